"""How often values fell between bounds. Pure."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values, and their sum.

    Attributes:
        bounds: upper bounds, ascending; a value is counted with the first that is not below it.
        counts: by bound, and of what is above the last.
        sum: of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Begin with none."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merge(self, other: "Histogram") -> None:
        """Count what another one has, whose bounds are the same."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
