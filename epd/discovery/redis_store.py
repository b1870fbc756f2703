"""Registrations in Redis: a hash with one field for each, and a field that marks it as complete."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from redis.exceptions import RedisError

from epd.deadline import within
from epd.discovery.entries import VERSION, EntriesInvalid, read_json, write_json
from epd.discovery.stores import Edit, Instances, StoreFailed
from epd.redis_urls import close, redis_client

KEY = "epd:instances"
"""Name of the hash; the `key` parameter of the URL replaces it."""

MARK = b"version"
"""The field that marks a complete hash. Without it, Redis has lost the data."""

TIMEOUT_S = 2.0
"""Timeout of a read, and of a write."""


class InRedis:
    """Implements `epd.discovery.stores.Store`. Field: a URL; value: its instance in JSON."""

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._key = key

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str) -> AsyncIterator[Self]:
        """Return a store that connects at the first call. The URL's `key` names another hash."""
        client, key = redis_client(url, KEY)
        try:
            yield cls(client, key)
        finally:
            await close(client)

    async def read(self) -> Instances | None:
        try:
            with within(TIMEOUT_S):
                found = await self._client.hgetall(self._key)
        except (RedisError, OSError) as error:
            raise StoreFailed(type(error).__name__) from error
        return _instances(found)

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        async def change(pipe: Any) -> None:
            whole = await pipe.hexists(self._key, MARK)
            pipe.multi()
            if not whole:
                pipe.delete(self._key)
                pipe.hset(self._key, mapping={MARK: VERSION, **_fields(known)})
            if edit is not None and edit.instance is not None:
                pipe.hset(self._key, mapping=_fields((edit.instance,)))
            elif edit is not None:
                pipe.hdel(self._key, edit.url)
            pipe.hgetall(self._key)

        try:
            with within(TIMEOUT_S):
                replies = await self._client.transaction(change, self._key)
        except (RedisError, OSError) as error:
            raise StoreFailed(type(error).__name__) from error
        return _instances(replies[-1]) or ()


def _fields(instances: Instances) -> dict[str | bytes, bytes | int]:
    return {one.url: write_json((one,)) for one in instances}


def _instances(found: dict[bytes, bytes]) -> Instances | None:
    if MARK not in found:
        return None
    try:
        rows = [read_json(value) for name, value in sorted(found.items()) if name != MARK]
    except EntriesInvalid as error:
        raise StoreFailed(f"the hash was not written by this proxy: {error}") from error
    return tuple(instance for row in rows for instance in row)
