"""Signals that end a command and its servers."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_contexts_on_signals() -> None:
    """Make the signals of `ENDING` raise `KeyboardInterrupt`: contexts then stop their servers."""
    # A shell starts background processes with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    # Under nohup, the process survives its terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _as_ctrl_c)


def _as_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    # An asyncio loop has its own handler of SIGINT: an exception raised in a callback is lost.
    signal.raise_signal(signal.SIGINT)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Delay the signals of `ENDING` until the end of the context.

    Otherwise a signal between the start of a process and the record of it would leave the process
    behind. The signals are not blocked, because a started process inherits the block for its whole
    life.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers only in the main thread
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in ENDING}
    kept = {number: how for number, how in handlers.items() if how not in {signal.SIG_IGN, None}}
    for number in kept:
        signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
