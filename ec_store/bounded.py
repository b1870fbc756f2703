"""Dictionary with an upper bound of its entries."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """Dictionary of at most `limit` entries: a new one evicts the least recently written one.

    A read changes nothing. A caller that wants LRU eviction calls `move_to_end` after it.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)  # `update` and `setdefault` of a subclass call it too
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)
