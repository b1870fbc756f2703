"""The host memory that fetched entries take, under one budget. No I/O, one thread."""

from collections import Counter, OrderedDict
from collections.abc import Mapping

from ec_store.entry import Entry

LARGE_BYTES = 2**20
PAGE_BYTES = 2 * 2**20
"""Stores read entries from `LARGE_BYTES` on into buffers that are multiples of this."""

OVERHEAD_BYTES = 2048
"""What an entry takes beside its tensor: its header, and Python's objects."""


def buffer_bytes(size_bytes: int) -> int:
    """Return the memory to reserve for a tensor of `size_bytes` before it is fetched."""
    pages = -(-size_bytes // PAGE_BYTES)
    # Stores decide by the size of the whole entry, with its header.
    is_small = size_bytes + OVERHEAD_BYTES < LARGE_BYTES
    return OVERHEAD_BYTES + (size_bytes if is_small else pages * PAGE_BYTES)


def entry_bytes(entry: Entry) -> int:
    """Return the memory that an entry takes: all of the buffer that its tensor lies in."""
    return OVERHEAD_BYTES + memoryview(entry.data.obj).nbytes


class Memory:
    """Entries in memory, and room that is reserved for those on their way.

    An entry that is claimed stays. Others are kept while there is room, the most recently used
    ones. Reservations, claimed entries and kept entries together stay within the budget, with one
    exception: see `admits`.

    Attributes:
        held_bytes: all entries, claimed or kept.
        pinned_bytes: entries that are claimed.
        reserved_bytes: reservations.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Hold nothing.

        Args:
            limit_bytes: the budget.
        """
        self.held_bytes = 0
        self.pinned_bytes = 0
        self.reserved_bytes = 0
        self._limit_bytes = limit_bytes
        self._pinned: dict[str, Entry] = {}
        self._kept: OrderedDict[str, Entry] = OrderedDict()
        self._reserved: dict[str, int] = {}
        self._claims: Counter[str] = Counter()

    def entry(self, identifier: str) -> Entry | None:
        """Return an entry that is held."""
        return self._pinned.get(identifier) or self._kept.get(identifier)

    def is_claimed(self, identifier: str) -> bool:
        """Tell whether an entry, or its reservation, is claimed."""
        return identifier in self._claims

    def admits(self, wanted: Mapping[str, int]) -> bool:
        """Tell whether all of these may be claimed at once.

        Kept entries make room. Where nothing is claimed, anything is admitted, even above the
        budget: what is larger than the budget would otherwise wait for ever.

        Args:
            wanted: bytes to reserve for each identifier that is not held.
        """
        needed = sum(self._needed(identifier, size) for identifier, size in wanted.items())
        taken = self.pinned_bytes + self.reserved_bytes
        return not needed or not self._claims or taken + needed <= self._limit_bytes

    def _needed(self, identifier: str, size_bytes: int) -> int:
        if identifier in self._claims or identifier in self._reserved:
            return 0
        kept = self._kept.get(identifier)
        return size_bytes if kept is None else entry_bytes(kept)

    def reserve(self, identifier: str, size_bytes: int) -> None:
        """Make room for an entry that is fetched now; kept entries go."""
        self._reserved[identifier] = size_bytes
        self.reserved_bytes += size_bytes
        self._trim()

    def arrive(self, identifier: str, entry: Entry | None) -> None:
        """End a reservation, and hold the entry that it was for, if it came."""
        self.reserved_bytes -= self._reserved.pop(identifier)
        if entry is not None:
            self.held_bytes += entry_bytes(entry)
            if identifier in self._claims:
                self._pin(identifier, entry)
            else:
                self._kept[identifier] = entry
        self._trim()

    def claim(self, identifier: str) -> None:
        """Hold an entry, or the one that is on its way, until `release`."""
        self._claims[identifier] += 1
        if identifier in self._kept:
            self._pin(identifier, self._kept.pop(identifier))

    def release(self, identifier: str) -> None:
        """Take one claim back."""
        self._claims[identifier] -= 1
        if self._claims[identifier] <= 0:
            self.release_all(identifier)

    def release_all(self, identifier: str) -> None:
        """Take all claims on an entry back."""
        self._claims.pop(identifier, None)
        entry = self._pinned.pop(identifier, None)
        if entry is not None:
            self.pinned_bytes -= entry_bytes(entry)
            self._kept[identifier] = entry
        self._trim()

    def discard(self, identifier: str) -> None:
        """Forget an entry that is kept."""
        entry = self._kept.pop(identifier, None)
        if entry is not None:
            self.held_bytes -= entry_bytes(entry)

    def _pin(self, identifier: str, entry: Entry) -> None:
        self._pinned[identifier] = entry
        self.pinned_bytes += entry_bytes(entry)

    def _trim(self) -> None:
        while self._kept and self.held_bytes + self.reserved_bytes > self._limit_bytes:
            self.discard(next(iter(self._kept)))
