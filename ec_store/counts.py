"""Counts by name that several threads add to."""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable


class Counts:
    """What was counted since it was last taken. Safe to use from many threads, and after a fork."""

    def __init__(self) -> None:
        """Count from nothing."""
        self._counts: Counter[str] = Counter()
        self._unlock()
        # A fork may happen while another thread holds the lock. What is registered stays for ever.
        unlock = weakref.WeakMethod(self._unlock)
        os.register_at_fork(after_in_child=lambda: _call(unlock()))

    def add(self, **counts: float) -> None:
        """Add to counts, by name."""
        with self._lock:
            self._counts.update(counts)

    def take(self) -> dict[str, float]:
        """What was counted, and begin anew."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)

    def __getitem__(self, name: str) -> int:
        """One count, a whole number; 0 where nothing was counted."""
        with self._lock:
            return int(self._counts[name])

    def _unlock(self) -> None:
        self._lock = threading.Lock()


def _call(function: Callable[[], None] | None) -> None:
    if function is not None:
        function()
