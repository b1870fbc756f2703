"""Caches without contents: what a cache of each size would answer. Pure."""

import math
from collections import OrderedDict

MAX_ITEMS = 1 << 18
"""Upper bound of the items that a cache of any size knows: they take about 80 MB."""

Origin = tuple[int | None, int]
"""Conversation and server of a reference to an item."""


class LruCache:
    """Cache of one size that evicts the item with the oldest reference.

    Attributes:
        size: sum of the sizes of its items at most, in any unit; infinite for no limit.
        hits: references that it would have answered.
        unsent_bytes: bytes of their media, in base64.
        saved_pixels: their pixels.
    """

    def __init__(self, size: float = math.inf, max_items: int = MAX_ITEMS) -> None:
        self.size = size
        self._max_items = max_items
        self.hits = self.unsent_bytes = self.saved_pixels = 0
        self._items: OrderedDict[int, tuple[float, Origin]] = OrderedDict()
        self._used = 0.0

    def refer(self, item: int, size: float, origin: Origin) -> Origin | None:
        """Return the origin of the item's reference before; None if the cache has no such item."""
        known = self._items.pop(item, None)
        self._items[item] = size, origin
        self._used += size - (0.0 if known is None else known[0])
        while self._used > self.size or len(self._items) > self._max_items:
            _, (freed, _) = self._items.popitem(last=False)
            self._used -= freed
        return None if known is None else known[1]
