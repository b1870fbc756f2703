"""Thread-safe counts and observations by name, and lock renewal after a fork.

A lock that another thread holds during `fork` stays held in the child, except that of a `ForkLock`.
Objects with other state of one process register a method with `after_fork`.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

MAX_OBSERVATIONS = 4096
"""Upper bound of the observations kept for each name until they are taken; the latest stay."""

_renewed: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
"""Names of the registered methods, by their objects."""


def after_fork(renew: Callable[[], None]) -> None:
    """Register a bound method to be called in every child of `fork` while its object lives."""
    _renewed[renew.__self__] = renew.__name__  # type: ignore[attr-defined]


def _renew_all() -> None:
    for owner, name in list(_renewed.items()):
        getattr(owner, name)()


# Registered once: the interpreter cannot unregister a function.
os.register_at_fork(after_in_child=_renew_all)


class ForkLock:
    """Holder of a lock that is free in every child of `fork`.

    It is no lock itself: a signal's exception within an `__enter__` written in Python would leave
    the lock locked.

    Attributes:
        mutex: the lock of this process.
    """

    def __init__(self) -> None:
        self._renew()
        after_fork(self._renew)

    def _renew(self) -> None:
        self.mutex = threading.Lock()


class Counts:
    """Counts and observations since they were last taken.

    Safe for many threads, and after a fork.
    """

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._observations: dict[str, deque[float]] = {}
        self._lock = ForkLock()

    def add(self, **counts: float) -> None:
        """Add values to counts, by name."""
        with self._lock.mutex:
            for name, value in counts.items():
                self._counts[name] = self._counts.get(name, 0) + value

    def observe(self, name: str, *values: float) -> None:
        """Record values of a histogram, by its name."""
        with self._lock.mutex:
            self._observations.setdefault(name, deque(maxlen=MAX_OBSERVATIONS)).extend(values)

    def take_counts(self) -> dict[str, float]:
        """Return the counts, and reset them."""
        with self._lock.mutex:
            taken, self._counts = self._counts, {}
        return taken

    def take_observations(self, most: int = MAX_OBSERVATIONS) -> dict[str, list[float]]:
        """Return the observations by name, and drop them.

        Args:
            most: upper bound of the observations returned for each name, the oldest first.
        """
        with self._lock.mutex:
            taken = {
                name: [values.popleft() for _ in range(min(most, len(values)))]
                for name, values in self._observations.items()
            }
        return {name: values for name, values in taken.items() if values}

    def __getitem__(self, name: str) -> int:
        """Return one count, rounded down; 0 if the name was never counted."""
        with self._lock.mutex:
            return int(self._counts.get(name, 0))
