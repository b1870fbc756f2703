"""Several calls at once, of which the first error ends the others."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
V = TypeVar("V")


async def gather_first(
    call: Callable[[T], Coroutine[Any, Any, V]], values: Iterable[T], at_once: int
) -> list[V]:
    """Return what a call returns for each value, in the order of the values.

    Args:
        call: is run as a task for each value.
        values: the calls' arguments.
        at_once: the most calls that run at a time.

    Raises:
        Exception: the first error of a call; the other calls are cancelled.
    """
    places = asyncio.Semaphore(at_once)
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for value in values:
                await places.acquire()
                task = group.create_task(call(value))
                task.add_done_callback(lambda _: places.release())
                tasks.append(task)
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]
