"""Signals that come while something must not be left half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Have signals that stop this process take effect when the context is left.

    Else one may come between a process and whoever is to end it. They are not blocked: what is
    started meanwhile would have them blocked for ever.
    """
    if threading.current_thread() is not threading.main_thread():  # where no signal interrupts
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    heeded = {number: it for number, it in handlers.items() if it not in {signal.SIG_IGN, None}}
    for number in heeded:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
