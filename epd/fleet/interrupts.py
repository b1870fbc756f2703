"""Signals that ask this process to end: they leave its contexts, but not amid a step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_contexts_on_signals() -> None:
    """Have them raise `KeyboardInterrupt`: whatever ends this process must end its servers too."""
    # A shell starts what it runs in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    # nohup: the terminal's end is not this one's.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _as_ctrl_c)


def _as_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    # A loop of asyncio has a handler of its own for that one, as what is raised in a callback is
    # lost.
    signal.raise_signal(signal.SIGINT)


@contextmanager
def held() -> Iterator[None]:
    """Keep them until the context is left; what they do, they do then.

    A process that was started, and of which nobody has taken note yet, would be left behind. They
    are not blocked, as processes that are started would have them blocked for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python's handlers run in the main thread alone
        return
    came: list[int] = []

    def keep(number: int, _: FrameType | None) -> None:
        came.append(number)

    handlers = {number: signal.getsignal(number) for number in ENDING}
    kept = {it: how for it, how in handlers.items() if how not in {signal.SIG_IGN, None}}
    for number in kept:
        signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
