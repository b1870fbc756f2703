"""Registrations in Redis, for several proxies.

If Redis has lost its data, its readers restore them: an empty Redis ends no registration.
A store with an empty list has not lost its data.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from epd.aio import cancel_after
from epd.discovery.entries import VERSION, EntriesInvalid, read_json, write_json
from epd.discovery.stores import Edit, Instances, StoreFailed
from epd.redis_urls import close, redis_client, redis_errors

KEY = "epd:instances"
"""Name of the hash; the `key` parameter of the URL replaces it."""

VERSION_FIELD = b"version"
"""The field that marks a complete hash. Without it, Redis has lost the data."""

TIMEOUT_S = 2.0
"""Timeout of a read, and of a write."""


class RegistrationsInRedis:
    """Implements `RegistrationStore` by a hash. Field: a URL; value: its instance in JSON."""

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
        with redis_errors(StoreFailed), cancel_after(TIMEOUT_S):
            found = await self._client.hgetall(self._key)
        return _instances(found)

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        async def change(pipe: Any) -> None:
            whole = await pipe.hexists(self._key, VERSION_FIELD)
            pipe.multi()
            if not whole:
                pipe.delete(self._key)
                pipe.hset(self._key, mapping={VERSION_FIELD: VERSION, **_fields(known)})
            if edit is not None and edit.instance is not None:
                pipe.hset(self._key, mapping=_fields((edit.instance,)))
            elif edit is not None:
                pipe.hdel(self._key, edit.url)
            pipe.hgetall(self._key)

        with redis_errors(StoreFailed), cancel_after(TIMEOUT_S):
            replies = await self._client.transaction(change, self._key)
        return _instances(replies[-1]) or ()


def _fields(instances: Instances) -> dict[str | bytes, bytes | int]:
    return {instance.url: write_json((instance,)) for instance in instances}


def _instances(found: dict[bytes, bytes]) -> Instances | None:
    if VERSION_FIELD not in found:
        return None
    try:
        rows = [read_json(value) for name, value in sorted(found.items()) if name != VERSION_FIELD]
    except EntriesInvalid as error:
        raise StoreFailed(f"the hash was not written by this proxy: {error}") from error
    return tuple(instance for row in rows for instance in row)
