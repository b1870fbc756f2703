"""Background tasks that run while a process serves. Their failures are logged and counted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import structlog

FIRST_DELAY_S = 1.0
"""Delay before the restart of a task that raised. Each further exception doubles it."""
MAX_DELAY_S = 60.0
"""Upper bound of the delay. A task that ran for this long starts again with the first delay."""

Work = Callable[[], Awaitable[None]]


class Background:
    """Runs tasks in the background, and restarts a task that raises.

    An unexpected exception is logged at once with its traceback, counted, and followed by a restart
    after a delay. It does not end the process. These tasks (probes, load reports, sources of
    instances, pages for other workers, reloads) only refresh the state that requests use, and
    requests are better served with stale state than not at all. Worker processes differ: the proxy
    cannot serve without them, so `server.workers` ends if they do not live.
    """

    def __init__(self, count: Callable[[str, int], None]) -> None:
        """Create the runner without tasks.

        Args:
            count: called with a task's name and 1 for each unexpected exception. Called with 0 when
                the task starts, because Prometheus sees no increase in a series that begins at 1.
        """
        self._count = count

    def failed(self, task: str) -> None:
        """Count an unexpected exception of a task that logs it and continues."""
        self._count(task, 1)

    @asynccontextmanager
    async def running(self, task: str, work: Work) -> AsyncIterator[None]:
        """Run a task until the context exits. The exit waits for the end of the task.

        Args:
            task: name in the log and in the metric.
            work: function to call at each start. It is not started again after it returns.
        """
        kept = asyncio.create_task(self.keep(task, work))
        try:
            yield
        finally:
            kept.cancel()
            with suppress(asyncio.CancelledError):
                await kept

    async def keep(self, task: str, work: Work) -> None:
        """Run a task to its end, and restart it after each exception. See `running`."""
        clock = asyncio.get_running_loop().time
        delay_s = FIRST_DELAY_S
        self._count(task, 0)
        while True:
            started_s = clock()
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - every exception is logged and counted
                if clock() - started_s >= MAX_DELAY_S:
                    delay_s = FIRST_DELAY_S
                self.failed(task)
                structlog.get_logger("epd").error(
                    "background task failed", task=task, restart_in_s=delay_s, exc_info=error
                )
            else:
                return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)
