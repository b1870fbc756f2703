"""Stores of conversations: in this process, or in Redis.

Several proxies can share the store in Redis. It has one key for each conversation, which Redis
expires.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from epd.conversations.turn import ConversationEntry, parse_entry
from epd.redis_urls import close, redis_client, redis_errors

MAX_ENTRIES = 10_000
"""Maximum of conversations in memory, per process."""

MAX_TOTAL_BYTES = 256 * 1024**2
"""Maximum size of all entries. Few entries are larger than some kilobytes."""

KEY = "epd:conversation"
"""Prefix of the keys; the `key` parameter of the URL replaces it."""


class StoreAway(Exception):
    """A read or a write failed. The message contains no secret."""


class StoredEntry(NamedTuple):
    """An entry with its time of expiry on the store's clock, and its size in bytes as JSON."""

    until_s: float
    entry: ConversationEntry
    size: int


class ConversationsInMemory:
    """Entries of this process. The oldest entry is evicted first; its use rewrites it."""

    def __init__(
        self,
        most: int = MAX_ENTRIES,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        """Create an empty store of at most this many entries."""
        self._most = most
        self._clock = clock
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, StoredEntry] = OrderedDict()
        self._bytes = 0
        self._evicted = 0

    @property
    def entry_count(self) -> int:
        """The number of entries that have not expired."""
        self._expire()
        return len(self._entries)

    @property
    def dropped_count(self) -> int:
        """The number of entries dropped without use: evicted, expired, or with lost blocks.

        An expired entry counts when it is detected.
        """
        return self._evicted

    async def take_entry(self, key: str) -> ConversationEntry | None:
        """Remove and return the entry of a key; None if there is none."""
        self._expire(key)
        stored = self._drop(key)
        return None if stored is None else stored.entry

    async def put(self, key: str, entry: ConversationEntry, ttl_s: float) -> None:
        """Store an entry, and replace an earlier one of this key."""
        self._expire(key)
        self._drop(key)
        self._entries[key] = stored = StoredEntry(
            self._clock() + ttl_s, entry, len(entry.to_json())
        )
        self._bytes += stored.size
        while len(self._entries) > self._most or self._bytes > self._max_bytes:
            self._evict(next(iter(self._entries)))

    def forget_decode(self, decode: str) -> None:
        """Drop the entries of a decode instance."""
        for key in [key for key, stored in self._entries.items() if stored.entry.decode == decode]:
            self._evict(key)

    async def close(self) -> None:
        """Do nothing: the store has no connection."""

    def _drop(self, key: str) -> StoredEntry | None:
        stored = self._entries.pop(key, None)
        if stored is not None:
            self._bytes -= stored.size
        return stored

    def _evict(self, key: str) -> None:
        self._drop(key)
        self._evicted += 1

    def _expire(self, key: str | None = None) -> None:
        """Evict expired entries: the one of this key, and those at the front.

        Expired entries remain for now behind one with a longer time to live.
        """
        now_s = self._clock()
        if key is not None and key in self._entries and self._entries[key].until_s <= now_s:
            self._evict(key)
        while self._entries and self._entries[first := next(iter(self._entries))].until_s <= now_s:
            self._evict(first)


class ConversationsInRedis:
    """Entries in Redis. Needs GETDEL, as in Redis 6.2 or newer.

    Attributes:
        entry_count: None, because the proxy does not count them.
        dropped_count: 0, because Redis expires them itself and has its own metrics.
    """

    entry_count = None
    dropped_count = 0

    def __init__(self, url: str) -> None:
        """Connect at the first call. The URL's `key` replaces the prefix of the keys.

        No command is retried: an entry that is put, taken and put again would be used twice.
        """
        self._client, self._key = redis_client(url, KEY, retry=False)

    async def take_entry(self, key: str) -> ConversationEntry | None:
        """Remove and return the entry of a key. Raise `StoreAway` if Redis does not answer."""
        with redis_errors(StoreAway):
            written = await self._client.getdel(f"{self._key}:{key}")
        return None if written is None else parse_entry(written)

    async def put(self, key: str, entry: ConversationEntry, ttl_s: float) -> None:
        """Store an entry. Raise `StoreAway` if Redis does not answer: it may be stored or not."""
        ttl_ms = max(1, round(1000 * ttl_s))
        with redis_errors(StoreAway):
            await self._client.set(f"{self._key}:{key}", entry.to_json(), px=ttl_ms)

    def forget_decode(self, decode: str) -> None:
        """Do nothing: entries are not searched; the reader of one detects the lost decode."""

    async def close(self) -> None:
        await close(self._client)


ConversationStore = ConversationsInMemory | ConversationsInRedis
"""Entries by key, with a time to live, each of which can be taken once."""
