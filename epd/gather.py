"""Concurrent calls that stop at the first error."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
V = TypeVar("V")


class StrictTaskGroup(asyncio.TaskGroup):
    """A task group that keeps its task's count of cancellations (`Task.cancelling`) correct.

    Time limits rely on that count (`asyncio.timeout`, `epd.edge.drain`). The task group of Python
    3.11 has two faults. If a task fails while the group waits at its end, one cancellation too many
    stays counted: the body of the group therefore waits for its tasks (`asyncio.wait`). A
    cancellation from outside at the moment of a failure is lost: this class raises it in place of
    the failure.
    """

    async def __aenter__(self) -> Self:
        self._cancels = _cancels()
        await super().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the group.

        Raises:
            BaseExceptionGroup: at least one task failed.
            asyncio.CancelledError: the task was cancelled, with or without a failure.
        """
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup:
            if _cancels() > self._cancels:
                raise asyncio.CancelledError from None
            raise


def _cancels() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def gather_first(
    call: Callable[[T], Coroutine[Any, Any, V]], values: Iterable[T], at_once: int
) -> list[V]:
    """Return the result of `call` for each value, in the order of the values.

    Args:
        call: function that runs as a task for each value.
        values: arguments of the calls.
        at_once: maximum number of concurrent calls.

    Raises:
        Exception: the first error of a call; the other calls are cancelled.
    """
    places = asyncio.Semaphore(at_once)
    tasks = []
    try:
        async with StrictTaskGroup() as group:
            for value in values:
                await places.acquire()
                task = group.create_task(call(value))
                task.add_done_callback(lambda _: places.release())
                tasks.append(task)
            if tasks:
                await asyncio.wait(tasks)
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]
