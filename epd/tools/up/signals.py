"""Signals that end a command and its servers."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def leave_contexts_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise `KeyboardInterrupt`: contexts then stop servers."""
    # A shell starts background processes with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    # Under nohup, the process survives its terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _as_ctrl_c)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Raise the `KeyboardInterrupt` of a signal that arrives within the context at its end."""
    arrived = list[int]()
    handler = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            signal.raise_signal(signal.SIGINT)


def _as_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    # An asyncio loop has its own handler of SIGINT: an exception raised in a callback is lost.
    signal.raise_signal(signal.SIGINT)
