"""Conversations in this process."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from epd.conversations.entry import Entry

MAX_TOTAL_BYTES = 256 * 1024**2
"""Of all entries: few are larger than some kilobytes."""


class Kept(NamedTuple):
    """An entry, and until when.

    Attributes:
        until_s: on the store's clock.
        entry: it.
        size: in bytes, as it would be written.
    """

    until_s: float
    entry: Entry
    size: int


class InMemory:
    """See `Store`. What was put longest ago makes room: what is used is put anew."""

    def __init__(
        self,
        most: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        """Begin empty.

        Args:
            most: how many there may be, asked each time.
            clock: seconds of a clock that never jumps.
            max_bytes: of all of them.
        """
        self._most = most
        self._clock = clock
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0
        self._evicted = 0

    @property
    def kept(self) -> int:
        """How many there are, without those whose time is over."""
        self._expire()
        return len(self._held)

    @property
    def evicted(self) -> int:
        """See `Store`."""
        return self._evicted

    async def take(self, key: str) -> Entry | None:
        """See `Store`."""
        self._expire(key)
        kept = self._drop(key)
        return None if kept is None else kept.entry

    async def put(self, key: str, entry: Entry, ttl_s: float) -> None:
        """See `Store`."""
        self._expire(key)
        self._drop(key)
        self._held[key] = kept = Kept(self._clock() + ttl_s, entry, len(entry.written()))
        self._bytes += kept.size
        while len(self._held) > self._most() or self._bytes > self._max_bytes:
            self._evict(next(iter(self._held)))

    def forget(self, decode: str) -> None:
        """See `Store`."""
        for key in [key for key, kept in self._held.items() if kept.entry.decode == decode]:
            self._evict(key)

    async def close(self) -> None:
        """See `Store`."""

    def _drop(self, key: str) -> Kept | None:
        kept = self._held.pop(key, None)
        if kept is not None:
            self._bytes -= kept.size
        return kept

    def _evict(self, key: str) -> None:
        self._drop(key)
        self._evicted += 1

    def _expire(self, key: str | None = None) -> None:
        """Evict what is over: this one, and the first ones.

        Those that were put when the time to live was longer may stay behind others.
        """
        now_s = self._clock()
        if key is not None and key in self._held and self._held[key].until_s <= now_s:
            self._evict(key)
        while self._held and self._held[first := next(iter(self._held))].until_s <= now_s:
            self._evict(first)
