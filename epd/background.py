"""Work that runs beside requests for as long as a process serves. It never ends silently."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import structlog

FIRST_DELAY_S = 1.0
"""Delay before work that has raised is restarted; doubled with each further exception."""
MAX_DELAY_S = 60.0
"""The longest such delay. Work that has run for as long begins again with the first delay."""

Work = Callable[[], Awaitable[None]]


class Background:
    """Runs work in the background, and restarts it when it raises.

    An unexpected exception is logged at once with its traceback, counted, and followed by a
    restart after a delay. It does not end the process: all that runs here (probes, load reports,
    sources of instances, pages for other workers, orders to reload) keeps up to date what requests
    use, and requests are served better from what is known than not at all. The worker processes
    are different. Nothing serves without them, so `server.workers` ends where they do not live.
    """

    def __init__(self, count: Callable[[str, int], None]) -> None:
        """Start nothing yet.

        Args:
            count: is called with a task's name and 1 for each unexpected exception, and with 0 when
                the task begins: a rise from nothing to 1 is none to Prometheus.
        """
        self._count = count

    def failed(self, task: str) -> None:
        """Count an unexpected exception of a task, which logs it and goes on."""
        self._count(task, 1)

    @asynccontextmanager
    async def running(self, task: str, work: Work) -> AsyncIterator[None]:
        """Keep work running until the context is left, which waits for its end.

        Args:
            task: its name in the log and in the metric.
            work: is called for each start. Work that returns is not started again.
        """
        kept = asyncio.create_task(self.keep(task, work))
        try:
            yield
        finally:
            kept.cancel()
            with suppress(asyncio.CancelledError):
                await kept

    async def keep(self, task: str, work: Work) -> None:
        """Run work to its end, and again after each exception. See `running`."""
        clock = asyncio.get_running_loop().time
        delay_s = FIRST_DELAY_S
        self._count(task, 0)
        while True:
            started_s = clock()
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is logged and counted
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
