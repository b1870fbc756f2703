"""Conversations in Redis, where several proxies find them: a key for each, which Redis expires."""

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from epd.conversations.entry import Entry, read
from epd.conversations.stores import StoreAway
from epd.redis_urls import close, redis_client

KEY = "epd:conversation"
"""What the keys begin with, unless the URL's `key` says otherwise."""


class InRedis:
    """See `Store`. It wants Redis 6.2 or newer, or what has its GETDEL.

    Attributes:
        kept: nobody counts them; Redis alone knows.
        evicted: Redis expires them itself, and its own figures tell.
    """

    kept = None
    evicted = 0

    def __init__(self, url: str) -> None:
        """Connect when it is asked. The URL's `key` names other keys.

        Nothing is tried again: an entry that was put, taken and put once more would be used twice.
        """
        once = Retry(NoBackoff(), 0)
        self._client, self._key = redis_client(url, KEY, once)

    async def take(self, key: str) -> Entry | None:
        """See `Store`."""
        try:
            written = await self._client.getdel(f"{self._key}:{key}")
        except (RedisError, OSError) as error:
            raise StoreAway(type(error).__name__) from error
        return None if written is None else read(written)

    async def put(self, key: str, entry: Entry, ttl_s: float) -> None:
        """See `Store`."""
        ttl_ms = max(1, round(1000 * ttl_s))
        try:
            await self._client.set(f"{self._key}:{key}", entry.written(), px=ttl_ms)
        except (RedisError, OSError) as error:
            raise StoreAway(type(error).__name__) from error

    def forget(self, decode: str) -> None:
        """See `Store`: they are not looked for; whoever takes one knows that it is of no use."""

    async def close(self) -> None:
        """See `Store`."""
        await close(self._client)
