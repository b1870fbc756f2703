"""Signals that end a command and its servers."""

import signal
from types import FrameType


def leave_contexts_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise `KeyboardInterrupt`: contexts then stop servers."""
    # A shell starts background processes with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    # Under nohup, the process survives its terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _as_ctrl_c)


def _as_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    # An asyncio loop has its own handler of SIGINT: an exception raised in a callback is lost.
    signal.raise_signal(signal.SIGINT)
