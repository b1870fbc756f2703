"""Store of conversations in this process."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from epd.conversations.entry import Entry

MAX_TOTAL_BYTES = 256 * 1024**2
"""Maximum size of all entries. Few entries are larger than some kilobytes."""


class Kept(NamedTuple):
    """An entry with its expiry.

    Attributes:
        until_s: time of expiry, on the store's clock.
        entry: the entry.
        size: size in bytes, as JSON.
    """

    until_s: float
    entry: Entry
    size: int


class InMemory:
    """Implements `Store`. The oldest entry is evicted first; its use rewrites it."""

    def __init__(
        self,
        most: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        """Create an empty store.

        Args:
            most: returns the maximum number of entries.
            clock: monotonic clock, in seconds.
            max_bytes: maximum size of all entries.
        """
        self._most = most
        self._clock = clock
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0
        self._evicted = 0

    @property
    def kept(self) -> int:
        """The number of entries that have not expired."""
        self._expire()
        return len(self._held)

    @property
    def evicted(self) -> int:
        return self._evicted

    async def take(self, key: str) -> Entry | None:
        self._expire(key)
        kept = self._drop(key)
        return None if kept is None else kept.entry

    async def put(self, key: str, entry: Entry, ttl_s: float) -> None:
        self._expire(key)
        self._drop(key)
        self._held[key] = kept = Kept(self._clock() + ttl_s, entry, len(entry.written()))
        self._bytes += kept.size
        while len(self._held) > self._most() or self._bytes > self._max_bytes:
            self._evict(next(iter(self._held)))

    def forget(self, decode: str) -> None:
        for key in [key for key, kept in self._held.items() if kept.entry.decode == decode]:
            self._evict(key)

    async def close(self) -> None:
        """See `Store`. There is nothing to close."""

    def _drop(self, key: str) -> Kept | None:
        kept = self._held.pop(key, None)
        if kept is not None:
            self._bytes -= kept.size
        return kept

    def _evict(self, key: str) -> None:
        self._drop(key)
        self._evicted += 1

    def _expire(self, key: str | None = None) -> None:
        """Evict expired entries: the one of this key, and those at the front.

        Expired entries remain for now behind one with a longer time to live.
        """
        now_s = self._clock()
        if key is not None and key in self._held and self._held[key].until_s <= now_s:
            self._evict(key)
        while self._held and self._held[first := next(iter(self._held))].until_s <= now_s:
            self._evict(first)
