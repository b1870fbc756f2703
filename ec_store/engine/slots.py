"""Allocation of places in a fixed memory."""

import threading
from collections import deque

from ec_store.arena.extents import PAGE_BYTES, Extent, ExtentAllocator


class Slots:
    """Allocator of offsets: the smallest hole that is large enough. Thread-safe.

    Places begin on a page, so that no two copies share one. A finalizer may release a place, and
    may run within any other call of this thread. So `free_slot` takes no lock.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes - size_bytes % PAGE_BYTES
        self._allocator = ExtentAllocator(self.size_bytes, max(self.size_bytes, PAGE_BYTES))
        self._lock = threading.Lock()
        self._taken: dict[int, tuple[Extent, ...]] = {}
        self._released: deque[int] = deque()

    def take_slot(self, size_bytes: int) -> int | None:
        """Allocate a place of this size and return its offset; None if none is free."""
        with self._lock:
            self._collect()
            extents = self._allocator.allocate(size_bytes, most=1)
            if extents is None:
                return None
            [place] = extents
            self._taken[place.offset] = extents
            return place.offset

    def free_slot(self, offset: int) -> None:
        """Release a place, without a lock."""
        self._released.append(offset)

    def taken_bytes(self) -> int:
        """Return the bytes in use, in whole pages."""
        with self._lock:
            self._collect()
            return self.size_bytes - self._allocator.free_bytes

    def _collect(self) -> None:
        while self._released:
            self._allocator.free(self._taken.pop(self._released.popleft()))
