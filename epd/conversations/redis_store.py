"""Store of conversations in Redis, shared by several proxies: one key each, which Redis expires."""

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from epd.conversations.entry import Entry, read
from epd.conversations.stores import StoreAway
from epd.redis_urls import close, redis_client

KEY = "epd:conversation"
"""Prefix of the keys; the `key` parameter of the URL replaces it."""


class InRedis:
    """Implements `Store`. Needs GETDEL, as in Redis 6.2 or newer.

    Attributes:
        kept: None, because the proxy does not count them.
        evicted: 0, because Redis expires them itself and has its own metrics.
    """

    kept = None
    evicted = 0

    def __init__(self, url: str) -> None:
        """Connect at the first call. The URL's `key` replaces the prefix of the keys.

        No command is retried: an entry that is put, taken and put again would be used twice.
        """
        once = Retry(NoBackoff(), 0)
        self._client, self._key = redis_client(url, KEY, once)

    async def take(self, key: str) -> Entry | None:
        try:
            written = await self._client.getdel(f"{self._key}:{key}")
        except (RedisError, OSError) as error:
            raise StoreAway(type(error).__name__) from error
        return None if written is None else read(written)

    async def put(self, key: str, entry: Entry, ttl_s: float) -> None:
        ttl_ms = max(1, round(1000 * ttl_s))
        try:
            await self._client.set(f"{self._key}:{key}", entry.written(), px=ttl_ms)
        except (RedisError, OSError) as error:
            raise StoreAway(type(error).__name__) from error

    def forget(self, decode: str) -> None:
        """See `Store`. Entries are not searched; the reader of an entry detects the lost decode."""

    async def close(self) -> None:
        await close(self._client)
