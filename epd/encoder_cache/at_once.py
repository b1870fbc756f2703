"""Where lookups run: on the event loop, or on a thread.

A call to a store in memory takes some microseconds. Passing it to a thread and back takes several
times as long. A call on the event loop, however, blocks all other requests. The choice depends on
the durations of earlier calls.
"""

SLOW_S = 0.001
"""Duration above which a call is slow."""

MOST_SLOW = 0.5
"""Share of slow calls on the event loop, above which calls are made on threads. Single slow calls
say little: the kernel may have given the core to another process meanwhile."""

WEIGHT = 0.2
"""Weight of the latest call in that share: four slow calls in a row exceed it."""

STALLED_S = 0.1
"""Duration of a single call that ends calls on the event loop."""

THREADS_S = 5.0
"""Minimum time for which calls then run on threads."""

MOST_KEYS = 16
"""Maximum number of entries in one call on the event loop."""


class AtOnce:
    """Decides by the durations of earlier lookups.

    A fast lookup on a thread is required before the first one on the event loop: at the start,
    after slow lookups, and after a timeout. While small lookups run on the event loop, a large one
    on a thread changes nothing.
    """

    def __init__(self, slow_s: float = SLOW_S) -> None:
        self._slow_s = slow_s
        self._trusted = False
        self._slow_share = 0.0
        self._threads_until_s = 0.0

    def allows_inline(self, keys: int, now_s: float) -> bool:
        """Return whether a lookup of this many entries runs on the event loop."""
        return self._trusted and keys <= MOST_KEYS and now_s >= self._threads_until_s

    def took_on_loop(self, seconds: float, now_s: float) -> None:
        self._slow_share += WEIGHT * ((seconds > self._slow_s) - self._slow_share)
        if self._slow_share > MOST_SLOW or seconds >= STALLED_S:
            self._stop_fast_path(now_s)

    def took_on_thread(self, seconds: float | None, now_s: float) -> None:
        """Record the duration of a lookup on a thread; None for a timeout."""
        if seconds is None:
            self._stop_fast_path(now_s)
        elif not self._trusted or now_s < self._threads_until_s:
            self._trusted, self._slow_share = seconds <= self._slow_s, 0.0

    def _stop_fast_path(self, now_s: float) -> None:
        self._trusted = False
        self._threads_until_s = now_s + THREADS_S
