"""Index of a host's memory for an event loop: all of a store but the payloads, without a thread."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

from ec_store.arena.aio_connection import AsyncArenaConnection
from ec_store.arena.fields import (
    claim_requests,
    digest_chunks,
    encode_name,
    entry_infos,
    find_requests,
    found_or_claimed,
    key_digest,
    namespaces_of,
    of_each,
    release_requests,
)
from ec_store.arena.index import Refusal
from ec_store.arena.protocol import (
    Begin,
    Begun,
    Claimed,
    ClaimKeys,
    Delete,
    Done,
    End,
    Find,
    Headers,
    NamespaceList,
    Register,
    Release,
    Reply,
)
from ec_store.arena.url import ArenaOptions, arena_options
from ec_store.entry import Entry, EntryInfo, encode_header
from ec_store.errors import StoreUnavailable
from ec_store.keys import EntryKey

R = TypeVar("R", bound=Reply)


class AsyncArenaStore:
    """Entries of a host's memory without their payloads. Belongs to one event loop.

    Results and errors are those of `Store`. A call for up to 4,096 keys is one message.
    """

    def __init__(self, options: ArenaOptions) -> None:
        """Create the store; the first call connects it."""
        self._connection = AsyncArenaConnection(options.path, options.timeout_s)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Create a store from its URL; the errors are those of `arena_options`."""
        return cls(arena_options(url))

    async def check(self) -> None:
        await self._ask(Find([]), Headers)

    async def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        return await self._find(keys, 0.0)

    async def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        return await self._find(keys, seconds)

    async def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        """Claim entries (see `Store.claim`). A claim ends with the connection too."""
        return (await self._claim(keys, owner, seconds, find=False))[0]

    async def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        claims, headers = await self._claim(keys, owner, seconds, find=True)
        return found_or_claimed(keys, headers, claims)

    async def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        for request in release_requests(keys, owner):
            await self._ask(request, Done)

    async def delete(self, keys: Sequence[EntryKey]) -> int:
        deleted = 0
        for digests in digest_chunks(keys):
            deleted += (await self._ask(Delete(digests), Done)).number
        return deleted

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
        return namespaces_of(await self._connection.call(Register(b"", b""), NamespaceList))

    async def close(self) -> None:
        await self._connection.close()

    async def _put(self, key: EntryKey, entry: Entry, *, replace: bool) -> bool:
        request = Begin(key_digest(key), encode_name(key.namespace), 0, replace)
        begun = await self._connection.call(request, Begun)
        if begun.number:
            header = encode_header(key, entry, "")
            return (await self._connection.call(End(begun.number, header), Done)).number == 1
        if begun.refusal == Refusal.THERE.value:
            return False
        raise StoreUnavailable(f"the arena does not take the entry: {begun.refusal}")

    async def _find(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        headers: list[bytes] = []
        for request in find_requests(keys, seconds):
            headers += of_each(request, (await self._ask(request, Headers)).headers)
        return entry_infos(keys, headers)

    async def _claim(
        self, keys: Sequence[EntryKey], owner: str, seconds: float, *, find: bool
    ) -> tuple[list[bool], list[bytes]]:
        """Return the claims; with `find` also the headers."""
        claims: list[bool] = []
        headers: list[bytes] = []
        for request in claim_requests(keys, owner, seconds, find=find):
            reply = await self._ask(request, Claimed)
            claims += of_each(request, reply.held)
            headers += of_each(request, reply.headers) if find else []
        return claims, headers

    async def _ask(self, request: Find | ClaimKeys | Release | Delete, reply_type: type[R]) -> R:
        return await self._connection.call(request, reply_type, len(request.digests))
