"""Data-parallel ranks behind one URL: which of them is next."""

from collections.abc import Mapping


class Ranks:
    """What each rank of an instance has to do, by the rule of `epd.routing.load`."""

    __slots__ = ("_asked", "_elsewhere", "_last", "_under_way")

    def __init__(self, count: int) -> None:
        self._under_way = [0] * count
        self._elsewhere = [0] * count
        self._asked = [0] * count
        self._last = -1

    def next(self) -> int:
        """The rank with the least to do; of equals, each in turn."""
        count = len(self._under_way)
        turns = [(self._last + step) % count for step in range(1, count + 1)]
        self._last = min(turns, key=lambda rank: self._under_way[rank] + self._elsewhere[rank])
        return self._last

    def begin(self, rank: int, *, asking: bool = False) -> None:
        """It has one more from here, while they are being asked or not."""
        self._under_way[rank] += 1
        if asking:
            self._asked[rank] = max(self._asked[rank], self._under_way[rank])

    def end(self, rank: int) -> None:
        """It has one less from here."""
        self._under_way[rank] -= 1

    def asked(self) -> None:
        """They are asked now what they have to do."""
        self._asked = self._under_way.copy()

    def reported(self, engines: Mapping[int, int]) -> None:
        """They have said it; what is not said of each rank is no use for any."""
        if engines.keys() == set(range(len(self._asked))):
            self._elsewhere = [max(0, engines[rank] - own) for rank, own in enumerate(self._asked)]
        else:
            self._elsewhere = [0] * len(self._asked)
