"""Host memory of fetched entries, within one budget. No I/O; for one thread."""

from collections import Counter, OrderedDict
from collections.abc import Mapping

from ec_store.entry import HeldEntry

LARGE_BYTES = 2**20
PAGE_BYTES = 2 * 2**20
"""Unit in bytes of the buffers into which stores read entries of `LARGE_BYTES` or more."""

OVERHEAD_BYTES = 2048
"""Bytes of an entry beside its tensor: its header, and Python's objects."""


def buffer_bytes(size_bytes: int) -> int:
    """Return the memory to reserve for a tensor of `size_bytes` before it is fetched."""
    pages = -(-size_bytes // PAGE_BYTES)
    # Stores choose the buffer by the size of the whole entry, with its header.
    is_small = size_bytes + OVERHEAD_BYTES < LARGE_BYTES
    return OVERHEAD_BYTES + (size_bytes if is_small else pages * PAGE_BYTES)


def entry_bytes(entry: HeldEntry) -> int:
    """Return the memory that an entry takes: the whole buffers that its tensor is in."""
    return OVERHEAD_BYTES + sum(memoryview(part.obj).nbytes for part in entry.parts)


class EntryMemory:
    """Entries in memory, and reservations for those being fetched.

    A pinned entry stays. Other entries are kept while there is room, the most recently used ones.
    Reservations, pinned entries and kept entries together stay within the budget, with one
    exception: see `has_room`.

    Attributes:
        held_bytes: bytes of all entries, pinned or kept.
        pinned_bytes: bytes of pinned entries.
        reserved_bytes: bytes of reservations.
    """

    def __init__(self, limit_bytes: int, *, keeps: bool = True) -> None:
        """Create the memory; without `keeps` only pinned entries stay."""
        self._keeps = keeps
        self.held_bytes = 0
        self.pinned_bytes = 0
        self.reserved_bytes = 0
        self._limit_bytes = limit_bytes
        self._pinned: dict[str, HeldEntry] = {}
        self._kept: OrderedDict[str, HeldEntry] = OrderedDict()
        self._reserved: dict[str, int] = {}
        self._pins: Counter[str] = Counter()

    def entry(self, identifier: str) -> HeldEntry | None:
        return self._pinned.get(identifier) or self._kept.get(identifier)

    def is_pinned(self, identifier: str) -> bool:
        return identifier in self._pins

    def has_room(self, wanted: Mapping[str, int]) -> bool:
        """Return whether all entries may be pinned, with these bytes for those not held.

        Kept entries make room. While nothing is pinned, any request is admitted, even above the
        budget: a request larger than the budget would otherwise wait indefinitely.
        """
        needed = sum(self._needed(identifier, size) for identifier, size in wanted.items())
        taken = self.pinned_bytes + self.reserved_bytes
        return not needed or not self._pins or taken + needed <= self._limit_bytes

    def _needed(self, identifier: str, size_bytes: int) -> int:
        if identifier in self._pins or identifier in self._reserved:
            return 0
        kept = self._kept.get(identifier)
        return size_bytes if kept is None else entry_bytes(kept)

    def reserve(self, identifier: str, size_bytes: int) -> None:
        """Reserve memory for an entry to be fetched; kept entries are dropped for it."""
        self._reserved[identifier] = size_bytes
        self.reserved_bytes += size_bytes
        self._trim()

    def hold_entry(self, identifier: str, entry: HeldEntry | None) -> None:
        """End a reservation, and hold its entry unless it is None."""
        self.reserved_bytes -= self._reserved.pop(identifier)
        if entry is not None:
            self.held_bytes += entry_bytes(entry)
            if identifier in self._pins:
                self._add_pinned(identifier, entry)
            else:
                self._kept[identifier] = entry
        self._trim()

    def pin(self, identifier: str) -> None:
        """Hold an entry, or the one being fetched, until `unpin`."""
        self._pins[identifier] += 1
        if identifier in self._kept:
            self._add_pinned(identifier, self._kept.pop(identifier))

    def unpin(self, identifier: str) -> None:
        self._pins[identifier] -= 1
        if self._pins[identifier] <= 0:
            self.unpin_all(identifier)

    def unpin_all(self, identifier: str) -> None:
        self._pins.pop(identifier, None)
        entry = self._pinned.pop(identifier, None)
        if entry is not None:
            self.pinned_bytes -= entry_bytes(entry)
            self._kept[identifier] = entry
        self._trim()

    def discard(self, identifier: str) -> None:
        entry = self._kept.pop(identifier, None)
        if entry is not None:
            self.held_bytes -= entry_bytes(entry)

    def _add_pinned(self, identifier: str, entry: HeldEntry) -> None:
        self._pinned[identifier] = entry
        self.pinned_bytes += entry_bytes(entry)

    def _trim(self) -> None:
        limit_bytes = self._limit_bytes if self._keeps else 0
        while self._kept and self.held_bytes + self.reserved_bytes > limit_bytes:
            self.discard(next(iter(self._kept)))
