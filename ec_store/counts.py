"""Counts and observations by name that several threads add to."""

import threading
from collections import Counter, deque

from ec_store.forks import after_fork

MAX_OBSERVATIONS = 4096
"""How many observations of one name are kept until they are taken: the latest."""


class Counts:
    """What was counted and observed since it was last taken.

    Safe to use from many threads, and after a fork.
    """

    def __init__(self) -> None:
        """Count from nothing."""
        self._counts: Counter[str] = Counter()
        self._observations: dict[str, deque[float]] = {}
        self._unlock()
        after_fork(self._unlock)

    def add(self, **counts: float) -> None:
        """Add to counts, by name."""
        with self._lock:
            self._counts.update(counts)

    def observe(self, name: str, *values: float) -> None:
        """Keep values for a histogram."""
        with self._lock:
            self._observations.setdefault(name, deque(maxlen=MAX_OBSERVATIONS)).extend(values)

    def take(self) -> dict[str, float]:
        """What was counted, and begin anew."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)

    def take_observations(self, most: int = MAX_OBSERVATIONS) -> dict[str, list[float]]:
        """Return what was observed, by name, and keep it no longer.

        Args:
            most: how many of each name are taken, the oldest first.
        """
        with self._lock:
            taken = {
                name: [values.popleft() for _ in range(min(most, len(values)))]
                for name, values in self._observations.items()
            }
        return {name: values for name, values in taken.items() if values}

    def __getitem__(self, name: str) -> int:
        """One count, a whole number; 0 where nothing was counted."""
        with self._lock:
            return int(self._counts[name])

    def _unlock(self) -> None:
        self._lock = threading.Lock()
