"""Stores of conversations: in this process, or in Redis.

Several proxies can share the store in Redis. It has one key for each conversation, which Redis
expires.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from epd.redis_urls import close, redis_client, redis_errors

MAX_ENTRIES = 10_000
"""Maximum of conversations in memory, per process."""

MAX_TOTAL_BYTES = 256 * 1024**2
"""Maximum size of all entries. Few entries are larger than some kilobytes."""

KEY = "epd:conversation"
"""Prefix of the keys; the `key` parameter of the URL replaces it."""


class StoreAway(Exception):
    """A read or a write failed. The message contains no secret."""


class ConversationsInMemory:
    """Entries of this process. The oldest entry is evicted first; its use rewrites it.

    Attributes:
        dropped_count: number of entries dropped without use: evicted or expired.
    """

    def __init__(
        self,
        most: int = MAX_ENTRIES,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        self._most = most
        self._clock = clock
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0
        self.dropped_count = 0

    @property
    def entry_count(self) -> int:
        self._evict()
        return len(self._entries)

    async def take_entry(self, key: str) -> bytes | None:
        self._evict()
        return self._drop(key)

    async def put(self, key: str, entry: bytes, ttl_s: float) -> None:
        """Store an entry, and replace an earlier one of this key.

        All entries have one time to live.
        """
        self._evict()
        self._drop(key)
        self._entries[key] = self._clock() + ttl_s, entry
        self._bytes += len(entry)
        self._evict()

    async def close(self) -> None:
        """Do nothing: the store has no connection."""

    def _drop(self, key: str) -> bytes | None:
        _, entry = self._entries.pop(key, (0.0, None))
        self._bytes -= len(entry or b"")
        return entry

    def _evict(self) -> None:
        """Drop the oldest entries: the expired ones, and those beyond the limits."""
        now_s = self._clock()
        while self._entries:
            oldest = next(iter(self._entries))
            fits = len(self._entries) <= self._most and self._bytes <= self._max_bytes
            if fits and now_s < self._entries[oldest][0]:
                return
            self._drop(oldest)
            self.dropped_count += 1


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

    async def take_entry(self, key: str) -> bytes | None:
        """Remove and return the entry of a key. Raise `StoreAway` if Redis does not answer."""
        with redis_errors(StoreAway):
            written: bytes | None = await self._client.getdel(f"{self._key}:{key}")
        return written

    async def put(self, key: str, entry: bytes, ttl_s: float) -> None:
        """Store an entry. Raise `StoreAway` if Redis does not answer: it may be stored or not."""
        with redis_errors(StoreAway):
            await self._client.set(f"{self._key}:{key}", entry, px=max(1, round(1000 * ttl_s)))

    async def close(self) -> None:
        await close(self._client)


ConversationStore = ConversationsInMemory | ConversationsInRedis
"""Entries by key, with a time to live, each of which can be taken once."""
