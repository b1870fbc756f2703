"""Allocation of places in a fixed memory."""

import bisect
import threading
from collections import deque

ALIGNMENT = 4096
"""Alignment in bytes: places begin on a page, so that no two copies share one."""


class Slots:
    """Allocator of offsets, first fit. Thread-safe.

    A finalizer may release a place, and may run within any other call of this thread. So
    `free_slot` takes no lock.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes - size_bytes % ALIGNMENT
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)] if self.size_bytes else []
        self._taken: dict[int, int] = {}
        self._given: deque[int] = deque()

    def take_slot(self, size_bytes: int) -> int | None:
        """Allocate a place of this size and return its offset; None if none is free."""
        wanted = max(1, -(-size_bytes // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            self._collect()
            for index, (start, length) in enumerate(self._free):
                if length >= wanted:
                    rest = (start + wanted, length - wanted)
                    self._free[index : index + 1] = [rest] if rest[1] else []
                    self._taken[start] = wanted
                    return start
        return None

    def free_slot(self, offset: int) -> None:
        """Release a place, without a lock."""
        self._given.append(offset)

    def taken_bytes(self) -> int:
        """Return the bytes in use, in whole pages."""
        with self._lock:
            self._collect()
            return sum(self._taken.values())

    def _collect(self) -> None:
        while self._given:
            start = self._given.popleft()
            end = start + self._taken.pop(start)
            index = bisect.bisect(self._free, (start, 0))
            if index < len(self._free) and self._free[index][0] == end:
                end += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, end - start))
