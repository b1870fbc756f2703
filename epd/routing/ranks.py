"""Data-parallel ranks behind one URL: which of them is next."""


class Ranks:
    """Requests under way on each rank of an instance."""

    __slots__ = ("_last", "_load")

    def __init__(self, count: int) -> None:
        self._load = [0] * count
        self._last = -1

    def next(self) -> int:
        """The rank with the fewest requests; of equals, each in turn."""
        count = len(self._load)
        turns = [(self._last + step) % count for step in range(1, count + 1)]
        self._last = min(turns, key=self._load.__getitem__)
        return self._last

    def begin(self, rank: int) -> None:
        """It has one more."""
        self._load[rank] += 1

    def end(self, rank: int) -> None:
        """It has one less."""
        self._load[rank] -= 1
