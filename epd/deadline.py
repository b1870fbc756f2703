"""A time limit for code that may lose a cancellation."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN_S = 0.05
"""Delay after which a task that still runs is cancelled again."""


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Cancel the body after a time, as `asyncio.timeout` does, and again until it ends.

    A library can lose a cancellation and then wait without a limit: Python 3.11's
    `asyncio.wait_for` drops one that arrives just as it ends
    (https://github.com/python/cpython/issues/86296).

    Args:
        limit_s: seconds from now.

    Raises:
        TimeoutError: the limit was reached and the body was cancelled.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("there is no task to cancel")
    loop = asyncio.get_running_loop()
    others, told = task.cancelling(), 0
    timer: asyncio.TimerHandle

    def tell() -> None:
        nonlocal told, timer
        told += 1
        task.cancel()
        timer = loop.call_later(AGAIN_S, tell)

    timer = loop.call_later(limit_s, tell)
    try:
        yield
    except asyncio.CancelledError as end:
        if told and task.cancelling() - told <= others:
            raise TimeoutError from end
        raise
    finally:
        timer.cancel()
        for _ in range(told):
            task.uncancel()
