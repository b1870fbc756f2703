"""Reuse distances of media items, by sampling: the hit rate of a cache of each size. Pure.

SHARDS (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015), with a limited
number of sampled items. An item is sampled if its hash is below a threshold, so that all of its
references are sampled or none. The distance of a sampled reference, multiplied by the number of
items for which a sampled one stands, estimates the size of the smallest LRU cache with the item.

Two numbers are known of all references, and not of the sample alone, so that a sample errs less:
how many different items there are, and how often each reference's item came before. The sampled
references to items that came as often stand for all of these (post-stratification): a sample with
too few or too many popular items, which have short distances, predicts as well.

A reference costs O(log n) for n sampled items.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

HASHES = 1 << 64
"""Number of different hashes; each is an integer below it."""


COUNTERS = 1 << 23
"""Counters of the references to items: 8 MiB, for 50 million items."""

MOST_COUNTED = 255
"""Largest value of a counter."""

CLASSES = MOST_COUNTED.bit_length() + 1
"""Number of classes of references: to items that came 0, 1, 2 to 3, 4 to 7, ... times before."""


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


class ReferenceCounts:
    """Numbers of references to all items, in one counter for the items with an equal hash."""

    def __init__(self) -> None:
        self._counters = bytearray(COUNTERS)
        self._used = 0

    def add(self, item: int) -> int:
        """Count a reference to an item, by its hash; return how many were counted before."""
        place = item % COUNTERS
        earlier = self._counters[place]
        self._used += not earlier
        self._counters[place] = min(earlier + 1, MOST_COUNTED)
        return earlier

    def distinct(self) -> float:
        """Return the estimated number of items: linear counting (Whang et al., TODS 1990)."""
        return -COUNTERS * math.log1p(-min(self._used, COUNTERS - 1) / COUNTERS)


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
    _counts: ReferenceCounts = field(default_factory=ReferenceCounts)
    _all: list[int] = field(default_factory=lambda: [0] * CLASSES)
    _sampled: list[float] = field(default_factory=lambda: [0.0] * CLASSES)
    _items: dict[int, Sampled] = field(default_factory=dict)
    _largest: list[int] = field(default_factory=list)
    _sizes: PrefixSums = field(default_factory=lambda: PrefixSums(1024))
    _next: int = 0
    _total: float = 0.0
    _hits: dict[float, list[float]] = field(default_factory=dict)

    def refer(self, item: int, size: float, origin: tuple[object, ...] = ()) -> Reference | None:
        """Count a reference to an item; return it if it is sampled.

        Args:
            item: a uniform hash of the item, below `HASHES`.
            size: size of the item's cache entry, in any unit; positive.
            origin: what the caller wants to know again at the item's next reference.
        """
        self.references += 1
        rank = self._counts.add(item).bit_length()
        self._all[rank] += 1
        if item >= self.share * HASHES:
            return None
        known = self._items.get(item)
        weight = self._items_of_each()
        self._sampled[rank] += weight
        if known is None:
            found = Reference(weight, math.inf, None)
            heapq.heappush(self._largest, -item)
        else:
            newer = self._total - self._sizes.up_to(known.position)
            found = Reference(weight, newer * weight + size, known.origin)
            for cache in self.sizes:
                if found.distance <= cache:
                    self._hits.setdefault(cache, [0.0] * CLASSES)[rank] += weight
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
        return sum(self._hits.get(size, ()))

    def hits(self, size: float) -> float:
        """Return the estimated number of references that the cache of this size would answer.

        A class of which no reference is sampled counts as answered: its items are popular.
        """
        hits = self._hits.get(size, [0.0] * CLASSES)
        classes = zip(self._all[1:], self._sampled[1:], hits[1:], strict=True)
        return sum(of_all * (hit / sampled if sampled else 1.0) for of_all, sampled, hit in classes)

    @property
    def distinct(self) -> float:
        """Estimated number of different items; exact while all of them are in the sample."""
        return len(self._items) if self.share == 1 else self._counts.distinct()

    def _items_of_each(self) -> float:
        """Return the number of items for which a sampled one stands."""
        return 1.0 if self.share == 1 else self._counts.distinct() / max(len(self._items), 1)

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
