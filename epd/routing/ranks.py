"""Data-parallel ranks behind one URL, and the choice among them."""

from collections.abc import Mapping


class Ranks:
    """The loads of an instance's ranks, by the rule of `epd.routing.load`."""

    __slots__ = ("_asked", "_elsewhere", "_last", "_under_way")

    def __init__(self, count: int) -> None:
        self._under_way = [0] * count
        self._elsewhere = [0] * count
        self._asked = [0] * count
        self._last = -1

    def next(self) -> int:
        """Return the rank with the lowest load; equal ones in turn."""
        count = len(self._under_way)
        turns = [(self._last + step) % count for step in range(1, count + 1)]
        self._last = min(turns, key=lambda rank: self._under_way[rank] + self._elsewhere[rank])
        return self._last

    def begin(self, rank: int, *, asking: bool = False) -> None:
        """Count the start of a local request, with or without an outstanding report."""
        self._under_way[rank] += 1
        if asking:
            self._asked[rank] = max(self._asked[rank], self._under_way[rank])

    def end(self, rank: int) -> None:
        self._under_way[rank] -= 1

    def asked(self) -> None:
        """Record that a report has been requested."""
        self._asked = self._under_way.copy()

    def reported(self, engines: Mapping[int, int]) -> None:
        """Record a report. A report that does not cover every rank is ignored."""
        if engines.keys() == set(range(len(self._asked))):
            self._elsewhere = [max(0, engines[rank] - own) for rank, own in enumerate(self._asked)]
        else:
            self._elsewhere = [0] * len(self._asked)
