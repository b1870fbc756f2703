"""When the store is called on the event loop, with no thread in between. Pure.

A call to a store in memory takes some microseconds, and to hand it to a thread and back takes
several times as long. But while it runs on the event loop, nothing else does.
"""

SLOW_S = 0.001
"""A longer call is slow."""

MOST_SLOW = 0.5
"""Share of slow calls on the event loop, above which calls are made on threads. Single slow calls
say little: the kernel may have given the core to another process meanwhile."""

WEIGHT = 0.2
"""Weight of the latest call in that share: four slow calls in a row exceed it."""

STALLED_S = 0.1
"""A call of this length ends calls on the event loop by itself."""

THREADS_S = 5.0
"""For how long calls are then made on threads at least."""

MOST_KEYS = 16
"""Entries in one call on the event loop."""


class AtOnce:
    """Decides by how long look-ups have taken.

    The latest look-up on a thread has to be fast before one is made on the event loop: at the
    start, after slow ones, and after one that did not end in time. Where look-ups of fewer entries
    are made on the event loop, one of many on a thread changes nothing.
    """

    def __init__(self) -> None:
        self._trusted = False
        self._slow_share = 0.0
        self._threads_until_s = 0.0

    def allows(self, keys: int, now_s: float) -> bool:
        """Return whether a look-up for so many entries is made on the event loop."""
        return self._trusted and keys <= MOST_KEYS and now_s >= self._threads_until_s

    def took_on_loop(self, seconds: float, now_s: float) -> None:
        """Judge by a call on the event loop."""
        self._slow_share += WEIGHT * ((seconds > SLOW_S) - self._slow_share)
        if self._slow_share > MOST_SLOW or seconds >= STALLED_S:
            self._distrust(now_s)

    def took_on_thread(self, seconds: float | None, now_s: float) -> None:
        """Judge by a look-up on a thread; None: it did not end in time."""
        if seconds is None:
            self._distrust(now_s)
        elif not self._trusted or now_s < self._threads_until_s:
            self._trusted, self._slow_share = seconds <= SLOW_S, 0.0

    def _distrust(self, now_s: float) -> None:
        self._trusted = False
        self._threads_until_s = now_s + THREADS_S
