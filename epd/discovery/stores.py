"""Stores of registrations: on a page of the workers of one proxy, or in Redis for several proxies.

If Redis has lost its data, its readers restore them: an empty Redis ends no registration. A store
with an empty list has not lost its data.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol, Self

from epd.aio import cancel_after
from epd.discovery.entries import VERSION, EntriesInvalid, read_json, write_json
from epd.redis_urls import close, redis_client, redis_errors
from epd.routing.instances import Instance
from epd.shared_page import PageUnreadable, SharedPage

Instances = tuple[Instance, ...]


class StoreFailed(Exception):
    """A read or a write failed. The message contains no secret."""


class Edit(NamedTuple):
    """A change: removes all instances with this URL, and adds the given one."""

    url: str
    instance: Instance | None = None

    def edited_instances(self, instances: Sequence[Instance]) -> Instances:
        others = tuple(instance for instance in instances if instance.url != self.url)
        return others if self.instance is None else (*others, self.instance)


class RegistrationStore(Protocol):
    """Registrations that several processes share."""

    async def read(self) -> Instances | None:
        """Return all registrations; None if the store is new, or has lost its data.

        Raises:
            StoreFailed: the store did not answer.
        """

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:
        """Make a change, and return the result. A store that has lost its data first gets `known`.

        Raises:
            StoreFailed: the store did not answer; the change may have been made or not.
        """


LOCK_S = 5.0
"""Maximum wait for the lock of a page, in seconds. A process that takes longer hangs."""


class RegistrationsOnPage:
    """Registrations that end with the last worker. An unwritten page has none."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page

    async def read(self) -> Instances | None:
        try:
            content = self._page.read()
        except (OSError, PageUnreadable) as error:
            raise StoreFailed(str(error)) from error
        return () if content is None else read_json(content)

    async def write(self, known: Instances, edit: Edit | None = None) -> Instances:  # noqa: ARG002
        try:
            async with asyncio.timeout(LOCK_S):
                while True:
                    try:
                        with self._page.hold_lock():
                            instances = await self.read() or ()
                            if edit is not None:
                                instances = edit.edited_instances(instances)
                            self._page.write(write_json(instances))
                            return instances
                    except BlockingIOError:  # another worker writes
                        await asyncio.sleep(0.01)
        except (OSError, TimeoutError) as error:
            raise StoreFailed(str(error) or "another worker holds the lock") from error


KEY = "epd:instances"
"""Name of the hash; the `key` parameter of the URL replaces it."""

MARK = b"version"
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

        with redis_errors(StoreFailed), cancel_after(TIMEOUT_S):
            replies = await self._client.transaction(change, self._key)
        return _instances(replies[-1]) or ()


def _fields(instances: Instances) -> dict[str | bytes, bytes | int]:
    return {instance.url: write_json((instance,)) for instance in instances}


def _instances(found: dict[bytes, bytes]) -> Instances | None:
    if MARK not in found:
        return None
    try:
        rows = [read_json(value) for name, value in sorted(found.items()) if name != MARK]
    except EntriesInvalid as error:
        raise StoreFailed(f"the hash was not written by this proxy: {error}") from error
    return tuple(instance for row in rows for instance in row)
