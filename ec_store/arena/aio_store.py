"""Index of a host's memory for an event loop: all of a store but the payloads, without a thread."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

from ec_store.arena.aio_connection import AsyncArenaConnection
from ec_store.arena.fields import (
    decode_name,
    digest_chunks,
    encode_name,
    entry_infos,
    key_digest,
)
from ec_store.arena.index import Refusal
from ec_store.arena.protocol import (
    LONGEST_S,
    Begin,
    Begun,
    Claimed,
    ClaimKeys,
    Delete,
    Done,
    End,
    Find,
    Headers,
    Namespaces,
    Register,
    Release,
    Reply,
    Request,
)
from ec_store.arena.url import ArenaOptions, arena_options
from ec_store.base import LONGEST_CLAIM_S
from ec_store.entry import Entry, EntryInfo, encode_header
from ec_store.errors import StoreUnavailable
from ec_store.keys import EntryKey, owner_bytes

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
        await self._ask([], Find([]), Headers)

    async def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        return await self._find(keys, 0.0)

    async def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        return await self._find(keys, min(seconds, LONGEST_S))

    async def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        """Claim entries (see `Store.claim`). A claim ends with the connection too."""
        return (await self._claim(keys, owner, seconds, find=False))[0]

    async def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        claims, headers = await self._claim(keys, owner, seconds, find=True)
        infos = entry_infos(keys, headers)
        return [info or held for info, held in zip(infos, claims, strict=True)]

    async def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        named = owner_bytes(owner)
        for digests in digest_chunks(keys):
            await self._ask(digests, Release(digests, named), Done)

    async def delete(self, keys: Sequence[EntryKey]) -> int:
        deleted = 0
        for digests in digest_chunks(keys):
            deleted += (await self._ask(digests, Delete(digests), Done)).number
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
        reply = await self._connection.call(Register(b"", b""), Namespaces)
        return {decode_name(model): decode_name(name) for model, name in reply.namespaces.items()}

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
        for digests in digest_chunks(keys):
            reply = await self._ask(digests, Find(digests, seconds), Headers)
            headers += _all_of(digests, reply.headers)
        return entry_infos(keys, headers)

    async def _claim(
        self, keys: Sequence[EntryKey], owner: str, seconds: float, *, find: bool
    ) -> tuple[list[bool], list[bytes]]:
        named, seconds = owner_bytes(owner), min(seconds, LONGEST_CLAIM_S)
        claims: list[bool] = []
        headers: list[bytes] = []
        for digests in digest_chunks(keys):
            reply = await self._ask(digests, ClaimKeys(digests, named, seconds, find), Claimed)
            claims += _all_of(digests, reply.held)
            headers += _all_of(digests, reply.headers) if find else []
        return claims, headers

    async def _ask(self, digests: Sequence[bytes], request: Request, reply_type: type[R]) -> R:
        return await self._connection.call(request, reply_type, len(digests))


T = TypeVar("T")


def _all_of(digests: Sequence[bytes], values: list[T]) -> list[T]:
    """Return the values in a reply. Raise StoreUnavailable if there is not one for each key."""
    if len(values) != len(digests):
        raise StoreUnavailable(f"the arena answers {len(values)} of {len(digests)} keys")
    return values
