"""A histogram with fixed bounds. Pure."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values by bound, and the sum of the values.

    Attributes:
        bounds: upper bounds, ascending. A value counts for the first bound that is not below it.
        counts: one count for each bound, and one for values above the last bound.
        sum: sum of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Add one value to the counts and to the sum."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merge(self, other: "Histogram") -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
