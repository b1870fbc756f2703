"""Index of a host's memory for an event loop: all of a store but the payloads, without a thread."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self

from ec_store.arena.aio_connection import ArenaEndpoint, AsyncArenaConnection, UnixEndpoint
from ec_store.arena.fields import (
    claim_request,
    encode_header,
    entry_infos,
    find_request,
    found_or_claimed,
    key_digest,
    key_digests,
    namespaces_of,
    of_each,
    release_request,
    stats_of,
)
from ec_store.arena.index import Refusal
from ec_store.arena.protocol import (
    Begin,
    Delete,
    End,
    Find,
    GetStats,
    Register,
)
from ec_store.arena.url import ArenaOptions
from ec_store.base import StoreStats
from ec_store.counts import Counts
from ec_store.entry import Entry, EntryInfo
from ec_store.errors import StoreUnavailable
from ec_store.keys import EntryKey, encode_name


class AsyncArenaStore:
    """Entries of a host's memory without their payloads. Belongs to one event loop.

    Results and errors are those of `Store`. A call is one message, for at most `MAX_KEYS` keys.
    """

    def __init__(self, endpoint: ArenaEndpoint, timeout_s: float) -> None:
        """Create the store; the first call connects it. Each call may take `timeout_s`."""
        self._connection = AsyncArenaConnection(endpoint, timeout_s)

    @classmethod
    def from_options(cls, options: ArenaOptions) -> Self:
        """Create the store of this host's memory."""
        return cls(UnixEndpoint(options.path), options.timeout_s)

    async def check(self) -> None:
        await self._connection.call(find_request([]))

    async def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        return entry_infos(keys, (await self._connection.call(find_request(keys))).headers)

    async def find_here(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        """Look entries up in the memory alone, and not in the tier behind it."""
        request = Find(key_digests(keys), local=True)
        return entry_infos(keys, (await self._connection.call(request)).headers)

    async def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        return entry_infos(keys, (await self._connection.call(find_request(keys, seconds))).headers)

    async def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        """Claim entries (see `Store.claim`). A claim ends with the connection too."""
        reply = await self._connection.call(claim_request(keys, owner, seconds, find=False))
        return of_each(keys, reply.claims)

    async def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        reply = await self._connection.call(claim_request(keys, owner, seconds, find=True))
        return found_or_claimed(keys, reply.headers, reply.claims)

    async def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        await self._connection.call(release_request(keys, owner))

    async def delete(self, keys: Sequence[EntryKey]) -> int:
        return (await self._connection.call(Delete(key_digests(keys)))).number

    async def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        """Write an entry without payload (see `Store.put`). A cancelled call runs to its end.

        Raises:
            ValueError: the entry has a payload, for which this store has no memory.
        """
        if entry.data.nbytes:
            raise ValueError("only a store with the memory writes payloads")
        writing = asyncio.ensure_future(self._put(key, entry, replace=replace))
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
        return await asyncio.shield(writing)

    async def namespaces(self) -> Mapping[str, str]:
        return namespaces_of(await self._connection.call(Register(b"", b"")))

    async def stats(self) -> StoreStats:
        """Return the metrics of the memory. This process reads and writes no payloads."""
        return stats_of(await self._connection.call(GetStats()), Counts())

    async def close(self) -> None:
        await self._connection.close()

    async def _put(self, key: EntryKey, entry: Entry, *, replace: bool) -> bool:
        header = encode_header(key, entry)
        request = Begin(key_digest(key), encode_name(key.namespace), 0, replace)
        begun = await self._connection.call(request)
        if begun.number:
            end = End(begun.number, header)
            return (await self._connection.call(end)).number == 1
        if begun.refusal == Refusal.THERE.value:
            return False
        raise StoreUnavailable(f"the arena does not take the entry: {begun.refusal}")
