"""Helpers for asyncio: background tasks, time limits, concurrent calls, and single flight."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from epd.errors import drop_tracebacks

FIRST_DELAY_S = 1.0
"""Delay before the restart of a task that raised. Each further exception doubles it."""
MAX_DELAY_S = 60.0
"""Upper bound of the delay. A task that ran for this long starts again with the first delay."""

AGAIN_S = 0.05
"""Delay after which a task that still runs is cancelled again."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
V = TypeVar("V")

Work = Callable[[], Awaitable[None]]
Start = Callable[[], Coroutine[Any, Any, V]]


class Background:
    """Runs tasks in the background, and restarts a task that raises.

    An unexpected exception is logged at once with its traceback, counted, and followed by a restart
    after a delay. It does not end the process. These tasks (probes, load reports, sources of
    instances, pages for other workers, reloads) only refresh the state that requests use, and
    requests are better served with stale state than not at all. Worker processes differ: the proxy
    cannot serve without them, so `epd.workers` ends if they do not live.
    """

    def __init__(
        self,
        count: Callable[[str, int], None],
        *,
        first_delay_s: float = FIRST_DELAY_S,
        max_delay_s: float = MAX_DELAY_S,
    ) -> None:
        """Create the runner without tasks.

        `count` is called with a task's name and 1 for each unexpected exception, and with 0 when
        the task starts, because Prometheus sees no increase in a series that begins at 1.
        """
        self._count = count
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s

    def count_exception(self, task: str) -> None:
        """Count an unexpected exception of a task that logs it and continues."""
        self._count(task, 1)

    @asynccontextmanager
    async def run_task(self, task: str, work: Work) -> AsyncIterator[None]:
        """Run a task, as `keep_running` does, until the context exits, which waits for its end."""
        running = asyncio.create_task(self.keep_running(task, work))
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def keep_running(self, task: str, work: Work) -> None:
        """Call `work` until it returns; after an exception, call it again.

        `task` is its name in the log and in the metric.
        """
        clock = asyncio.get_running_loop().time
        delay_s = self._first_delay_s
        self._count(task, 0)
        while True:
            started_s = clock()
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - every exception is logged and counted
                if clock() - started_s >= self._max_delay_s:
                    delay_s = self._first_delay_s
                self.count_exception(task)
                structlog.get_logger("epd").error(
                    "background task failed", task=task, restart_in_s=delay_s, exc_info=error
                )
            else:
                return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._max_delay_s)


@contextmanager
def cancel_after(limit_s: float) -> Iterator[None]:
    """Cancel the body after `limit_s` seconds, as `asyncio.timeout` does, and again until it ends.

    A library can lose a cancellation and then wait without a limit: Python 3.11's
    `asyncio.wait_for` drops one that arrives just as it ends
    (https://github.com/python/cpython/issues/86296).

    Raises:
        TimeoutError: the limit was reached and the body was cancelled.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("there is no task to cancel")
    loop = asyncio.get_running_loop()
    others, cancelled = task.cancelling(), 0
    timer: asyncio.TimerHandle

    def cancel_body() -> None:
        nonlocal cancelled, timer
        cancelled += 1
        task.cancel()
        timer = loop.call_later(AGAIN_S, cancel_body)

    timer = loop.call_later(limit_s, cancel_body)
    try:
        yield
    except asyncio.CancelledError as end:
        if cancelled and task.cancelling() - cancelled <= others:
            raise TimeoutError from end
        raise
    finally:
        timer.cancel()
        for _ in range(cancelled):
            task.uncancel()


def errors_of(tasks: Iterable[asyncio.Task[Any]]) -> list[BaseException]:
    """Return the errors of the tasks that have failed, in order."""
    return [
        error
        for task in tasks
        if task.done() and not task.cancelled() and (error := task.exception()) is not None
    ]


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather_first(
    call: Callable[[T], Coroutine[Any, Any, V]], values: Iterable[T], at_once: int
) -> list[V]:
    """Return the result of `call` for each value, in order. At most `at_once` calls run at a time.

    Time limits rely on the count of cancellations (`asyncio.timeout`, `epd.edge.drain`), which the
    task group of Python 3.11 does not keep: a cancellation at the moment of a failure is lost.

    Raises:
        Exception: the first error of a call; the other calls are cancelled.
    """
    slots, tasks = asyncio.Semaphore(at_once), list[asyncio.Task[V]]()
    try:
        for value in values:
            await slots.acquire()
            if errors_of(tasks):
                break
            tasks.append(task := asyncio.create_task(call(value)))
            task.add_done_callback(lambda _: slots.release())
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = errors_of(tasks)
    finally:
        await end_tasks(tasks)
    if errors:
        first, *others = errors
        for other in others:
            drop_tracebacks(other)
        raise first from first.__cause__
    return [task.result() for task in tasks]


@dataclass(slots=True)
class _Flight(Generic[V]):
    task: asyncio.Task[V]
    waiters: int = 0


class Flights(Generic[K, V]):
    """Runs by key, one at a time for each key. A run without waiters is cancelled.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}
        self._tasks: set[asyncio.Task[V]] = set()

    def __contains__(self, key: K) -> bool:
        """Return whether a run of this key is in progress, which a caller can join."""
        flight = self._flights.get(key)
        return flight is not None and not flight.task.done()

    async def join(self, key: K, start: Start[V]) -> V:
        """Return the result of the run of this key; call `start` if there is no run.

        Every waiter receives an error of the run. Cancelling one waiter does not cancel the run for
        the others.
        """
        flight = self._flights.get(key)
        # A run that has ended is removed by a callback of the next iteration of the loop.
        if flight is None or flight.task.done():
            flight = self._add(key, asyncio.create_task(start()))
        return await self._wait(key, flight)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _add(self, key: K, task: asyncio.Task[V]) -> _Flight[V]:
        flight = self._flights[key] = _Flight(task)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._close_flight(key, flight))
        return flight

    async def _wait(self, key: K, flight: _Flight[V]) -> V:
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                self._close_flight(key, flight)
                flight.task.cancel()

    def _close_flight(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done():
            self._tasks.discard(flight.task)
            if not flight.task.cancelled():
                flight.task.exception()  # mark it as retrieved: there may be no waiter left
