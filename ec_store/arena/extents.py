"""Allocator of a memory in extents: an entry takes the fewest holes that are large enough. Pure.

A hole is a free range between two entries. An entry is placed in the smallest hole that it fits
into. If there is none, it is divided over the largest holes. So entries of any size can take the
place of others of the same total size, and no byte has to be moved. An allocator of contiguous
places would have to evict a multiple of the bytes that it needs: in a full memory with entries of
64 KiB to 150 MB, holes of the size of a large entry are rare.
"""

import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PAGE_BYTES = 4096
"""Alignment of extents in bytes: no two entries share a page."""

MAX_EXTENTS = 64
"""Upper bound of the extents of one entry, and so of the copies that move it."""


class Extent(NamedTuple):
    """Range of bytes in the memory."""

    offset: int
    size_bytes: int


class ExtentAllocator:
    """Allocator of extents. Not thread-safe.

    An extent lies within one segment: a device copies within memory that was registered at once.
    The cost of a call grows with the extents it returns or gets, and with a shift within a list of
    the holes; memory without holes has one hole in each segment.

    Attributes:
        size_bytes: size of the memory, in whole pages.
        free_bytes: bytes in all holes.
    """

    def __init__(self, size_bytes: int, segment_bytes: int) -> None:
        """Manage a memory of this size, which is divided into segments.

        Raises:
            ValueError: a segment is not a positive number of whole pages.
        """
        if segment_bytes < PAGE_BYTES or segment_bytes % PAGE_BYTES:
            raise ValueError(f"a segment of {segment_bytes} bytes is not of whole pages")
        self.size_bytes = size_bytes - size_bytes % PAGE_BYTES
        self.free_bytes = self.size_bytes
        self._segment_bytes = segment_bytes
        self._sizes: list[tuple[int, int]] = []
        """Size and offset of each hole, sorted."""
        self._begins: dict[int, int] = {}
        """Size of each hole, by its offset."""
        self._ends: dict[int, int] = {}
        """Offset of each hole, by its end."""
        for offset in range(0, self.size_bytes, segment_bytes):
            self._add(offset, min(segment_bytes, self.size_bytes - offset))

    def allocate(self, size_bytes: int, most: int = MAX_EXTENTS) -> tuple[Extent, ...] | None:
        """Return extents for an entry of this size, at most so many; the last one ends on a page.

        Return None if the holes are too small or too many. Nothing is taken then.
        """
        wanted = max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES
        if wanted > self.free_bytes:
            return None
        fitting = bisect.bisect_left(self._sizes, (wanted, 0))
        if fitting < len(self._sizes):
            return (self._take(self._sizes[fitting], wanted),)
        holes, missing = [], wanted
        for hole in reversed(self._sizes[-most:]):
            holes.append((hole, min(hole[0], missing)))
            missing -= holes[-1][1]
            if not missing:
                return tuple(self._take(*each) for each in holes)
        return None

    def free(self, extents: Iterable[Extent]) -> None:
        """Make extents free again. Neighbouring holes of a segment become one."""
        for offset, size_bytes in extents:
            self.free_bytes += size_bytes
            begin, end = offset, offset + size_bytes
            if end % self._segment_bytes and end in self._begins:
                end += self._remove(end)
            if begin % self._segment_bytes and begin in self._ends:
                begin = self._ends[begin]
                self._remove(begin)
            self._add(begin, end - begin)

    def holes(self) -> Iterator[Extent]:
        """Yield the holes, by offset."""
        yield from (Extent(*hole) for hole in sorted(self._begins.items()))

    def _take(self, hole: tuple[int, int], wanted: int) -> Extent:
        size_bytes, offset = hole
        self._remove(offset)
        if size_bytes > wanted:
            self._add(offset + wanted, size_bytes - wanted)
        self.free_bytes -= wanted
        return Extent(offset, wanted)

    def _add(self, offset: int, size_bytes: int) -> None:
        bisect.insort(self._sizes, (size_bytes, offset))
        self._begins[offset] = size_bytes
        self._ends[offset + size_bytes] = offset

    def _remove(self, offset: int) -> int:
        size_bytes = self._begins.pop(offset)
        del self._ends[offset + size_bytes]
        del self._sizes[bisect.bisect_left(self._sizes, (size_bytes, offset))]
        return size_bytes
