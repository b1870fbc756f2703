"""Reuse distances of media items, by sampling: the hit rate of a cache of each size. Pure.

SHARDS (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015), with a limited
number of sampled items. An item is sampled if its hash is below a threshold, so that all of its
references are sampled or none. The distance of a sampled reference, multiplied by the number of
items for which a sampled one stands, estimates the size of the smallest LRU cache with the item.

That number is not the inverse of the threshold, as in the paper, but all items divided by sampled
ones. All items are counted apart, at least as exactly as 0.1 %, so that the chance by which a
sample has too many or too few items does not count: errors are a half to a fifth.

A reference costs O(log n) for n sampled items.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

HASHES = 1 << 64
"""Number of different hashes; each is an integer below it."""


BITMAP_BITS = 1 << 23
"""Bits of the bitmap by which items are counted: 1 MiB, for 50 million items."""


@dataclass(slots=True)
class Sampled:
    """A sampled item: its place in the order of the latest references, and its size."""

    position: int
    size: float
    origin: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """A sampled reference to an item.

    Attributes:
        weight: number of references for which it stands.
        distance: size of the smallest cache that has the item; infinite for the first reference.
        earlier: origin of the item's latest reference before; None for the first one.
    """

    weight: float
    distance: float
    earlier: tuple[object, ...] | None


class PrefixSums:
    """Sums of the sizes at the first positions: a Fenwick tree (Fenwick, 1994)."""

    def __init__(self, length: int) -> None:
        self._nodes = [0.0] * (length + 1)

    def __len__(self) -> int:
        return len(self._nodes) - 1

    def add(self, position: int, size: float) -> None:
        position += 1
        while position < len(self._nodes):
            self._nodes[position] += size
            position += position & -position

    def up_to(self, position: int) -> float:
        """Return the sum of the sizes at this position and the ones before."""
        position += 1
        total = 0.0
        while position:
            total += self._nodes[position]
            position &= position - 1
        return total


class DistinctItems:
    """Number of different items, by linear counting (Whang et al., ACM TODS 1990)."""

    def __init__(self) -> None:
        self._bitmap = bytearray(BITMAP_BITS // 8)
        self._ones = 0

    def add(self, item: int) -> None:
        """Count an item by its hash."""
        place = item % BITMAP_BITS
        byte, bit = place >> 3, 1 << (place & 7)
        if not self._bitmap[byte] & bit:
            self._bitmap[byte] |= bit
            self._ones += 1

    def estimate(self) -> float:
        """Return the estimated number of items."""
        return -BITMAP_BITS * math.log1p(-min(self._ones, BITMAP_BITS - 1) / BITMAP_BITS)


@dataclass(slots=True)
class ReuseDistances:
    """Distances between the references to equal items, and what caches of some sizes would answer.

    Attributes:
        sizes: sizes of the caches.
        most: maximum number of sampled items.
        share: share of the items that are sampled; it falls when there are more than `most`.
        references: number of all references.
    """

    sizes: Sequence[float] = ()
    most: int = 1 << 16
    share: float = 1.0
    references: int = 0
    _sampled_repeats: float = 0.0
    _distinct: DistinctItems = field(default_factory=DistinctItems)
    _items: dict[int, Sampled] = field(default_factory=dict)
    _largest: list[int] = field(default_factory=list)
    _sizes: PrefixSums = field(default_factory=lambda: PrefixSums(1024))
    _next: int = 0
    _total: float = 0.0
    _hits: dict[float, float] = field(default_factory=dict)

    def refer(self, item: int, size: float, origin: tuple[object, ...] = ()) -> Reference | None:
        """Count a reference to an item; return it if it is sampled.

        Args:
            item: a uniform hash of the item, below `HASHES`.
            size: size of the item's cache entry, in any unit; positive.
            origin: what the caller wants to know again at the item's next reference.
        """
        self.references += 1
        self._distinct.add(item)
        if item >= self.share * HASHES:
            return None
        known = self._items.get(item)
        weight = self._items_of_each()
        if known is None:
            found = Reference(weight, math.inf, None)
            heapq.heappush(self._largest, -item)
        else:
            newer = self._total - self._sizes.up_to(known.position)
            found = Reference(weight, newer * weight + size, known.origin)
            self._sampled_repeats += weight
            for cache in self.sizes:
                if found.distance <= cache:
                    self._hits[cache] = self._hits.get(cache, 0.0) + weight
            self._remove(known)
        if self._next == len(self._sizes):
            self._renumber()
        self._items[item] = Sampled(self._next, size, origin)
        self._sizes.add(self._next, size)
        self._total += size
        self._next += 1
        if len(self._items) > self.most:
            self._sample_fewer()
        return found

    def sampled_hits(self, size: float) -> float:
        """Return the sum of the weights of the sampled references that this cache would answer."""
        return self._hits.get(size, 0.0)

    def hits(self, size: float) -> float:
        """Return the estimated number of references that the cache of this size would answer.

        The repeats that the sample has too few or too many of are those of popular items, which
        have short distances (SHARDS-adj in the paper).
        """
        if (found := self.sampled_hits(size)) == 0:
            return 0.0
        return min(max(found + self.repeats - self._sampled_repeats, 0.0), self.repeats)

    @property
    def distinct(self) -> float:
        """Estimated number of different items; exact while all of them are in the sample."""
        return len(self._items) if self.share == 1 else self._distinct.estimate()

    @property
    def repeats(self) -> float:
        """Estimated number of references to an item that was seen before."""
        return max(self.references - self.distinct, 0.0)

    def _items_of_each(self) -> float:
        """Return the number of items for which a sampled one stands."""
        return 1.0 if self.share == 1 else self._distinct.estimate() / max(len(self._items), 1)

    def _remove(self, item: Sampled) -> None:
        self._sizes.add(item.position, -item.size)
        self._total -= item.size

    def _sample_fewer(self) -> None:
        """Drop the item with the largest hash, which becomes the threshold."""
        largest = -heapq.heappop(self._largest)
        self._remove(self._items.pop(largest))
        self.share = largest / HASHES

    def _renumber(self) -> None:
        """Give the items the lowest positions, in their order; make room for as many again."""
        self._sizes = PrefixSums(max(1024, 2 * len(self._items)))
        for position, item in enumerate(sorted(self._items.values(), key=attrgetter("position"))):
            item.position = position
            self._sizes.add(position, item.size)
        self._next = len(self._items)
        self._total = sum(item.size for item in self._items.values())
