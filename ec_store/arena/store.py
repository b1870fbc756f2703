"""Store in the memory of a host, which `ec-store serve` owns."""

import random
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self, TypeVar

import msgspec
import numpy as np
import xxhash

from ec_store.arena.connection import ArenaConnection, Bytes, MappedArena, WaitingConnections
from ec_store.arena.fields import (
    decode_name,
    digest_chunks,
    encode_name,
    entry_info,
    key_digest,
)
from ec_store.arena.index import Refusal
from ec_store.arena.protocol import (
    LONGEST_S,
    BadMessage,
    Begin,
    Begun,
    Claimed,
    ClaimKeys,
    Delete,
    Discard,
    Done,
    End,
    Find,
    GetStats,
    Headers,
    List,
    Namespaces,
    Page,
    Pin,
    Pins,
    Purge,
    Read,
    Register,
    Release,
    Reply,
    Request,
    Row,
    Stats,
    Wait,
)
from ec_store.arena.url import ArenaOptions, arena_options
from ec_store.base import LONGEST_CLAIM_S, Listed, Store, StoreStats
from ec_store.counts import Counts
from ec_store.entry import Buffers, Entry, EntryInfo, checksum, encode_header, parse_header
from ec_store.errors import CorruptEntry, EntryTooLarge, OtherFormat, StoreUnavailable
from ec_store.keys import EntryKey, owner_bytes

R = TypeVar("R", bound=Reply)

CHUNK_BYTES = 256 * 2**10
"""Bytes that are copied and then hashed: less than the cache of a core."""

OTHERS_WRITE_S = 10.0
"""Time in seconds that `put` waits for another process that writes the same entry."""


class ArenaStore(Store):
    """Store of entries in a host's memory. Thread-safe, also after forks.

    It connects at the first call. Payloads are copied here, between this process's memory and the
    host's; everything else is one round trip to the server.

    Attributes:
        options: options of its URL.
    """

    def __init__(self, options: ArenaOptions) -> None:
        """Create a store; the first call connects it."""
        self.options = options
        self._connection = ArenaConnection(options.path, "writer", options.timeout_s)
        self._waiting = WaitingConnections(options.path, options.timeout_s)
        self._buffers = Buffers()
        self.counts = Counts()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Create a store from its URL; the errors are those of `arena_options`."""
        return cls(arena_options(url))

    def __repr__(self) -> str:
        return f"ArenaStore({self.options.path})"

    def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        """Write an entry (see `Store.put`).

        If another process is writing it, wait until it is there, for `OTHERS_WRITE_S` at most.
        """
        data = entry.data.cast("B")
        try:
            begun = self._begin(
                Begin(key_digest(key), encode_name(key.namespace), data.nbytes, replace)
            )
            written = begun is not None and self._write(key, entry, *begun)
        except (StoreUnavailable, EntryTooLarge):
            self.counts.add(drops=1)
            raise
        self.counts.add(puts=written)
        return written

    def get(self, key: EntryKey) -> Entry | None:
        """Return an entry (see `Store.get`).

        Its bytes are a view of the host's memory, pinned until the last view of them is deleted.
        An entry in several extents is copied.
        """
        reply, arena = self._connection.call(Read([key_digest(key)]), Pins)
        entry = None
        [pin] = reply.pins
        if pin.number:
            try:
                entry = self._entry(key, arena, pin)
            except OtherFormat:
                arena.released.append(pin.number)
            except CorruptEntry:
                self.counts.add(corrupt=1)
                try:
                    self._connection.call(Discard(pin.number), Done, within=arena)
                finally:
                    arena.released.append(pin.number)
            except BaseException:  # no memory for a copy, or a signal
                arena.released.append(pin.number)
                raise
        self.counts.add(misses=entry is None, hits=entry is not None)
        return entry

    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        return self._find(keys, 0.0)

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        return self._find(keys, seconds)

    def claim(
        self,
        keys: Sequence[EntryKey],
        owner: str,
        seconds: float,
        *,
        wait: bool = True,  # noqa: ARG002 - the server decides at once
    ) -> list[bool]:
        """Claim entries (see `Store.claim`). A claim ends with this store's connection too."""
        return [
            held
            for request in self._claims(keys, owner, seconds, find=False)
            for held in self._ask(request, Claimed).held
        ]

    def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        """Claim missing entries (see `Store.claim_or_find`), in one round trip."""
        headers: list[bytes] = []
        claims: list[bool] = []
        for request in self._claims(keys, owner, seconds, find=True):
            reply = self._ask(request, Claimed)
            headers += reply.headers
            claims += reply.held
        infos = map(entry_info, keys, headers)
        return [info or held for info, held in zip(infos, claims, strict=True)]

    def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        named = owner_bytes(owner)
        for digests in digest_chunks(keys):
            self._ask(Release(digests, named), Done)

    def delete(self, keys: Sequence[EntryKey]) -> int:
        return sum(self._ask(Delete(digests), Done).number for digests in digest_chunks(keys))

    def purge(self, namespace: str) -> int:
        return self._ask(Purge(encode_name(namespace)), Done).number

    def ls(self) -> Iterator[Listed]:
        """Yield every entry, in the order of their digests."""
        for row in self._rows():
            yield _listed(row)

    def verify(self, *, fix: bool = False) -> Iterator[Listed]:
        for row in self._rows():
            listed = _listed(row)
            if listed.info is not None:
                listed = replace(listed, problem=self._problem(listed.info))
            if fix and listed.problem:
                self._ask(Delete([row.digest]), Done)
            yield listed

    def evict(self) -> int:
        """Return 0: the server evicts when a write needs room."""
        return 0

    def stats(self) -> StoreStats:
        stats = self._ask(GetStats(), Stats)
        return StoreStats(
            entries=stats.entries,
            bytes=stats.taken_bytes,
            max_bytes=stats.size_bytes,
            leased=stats.leased,
            **self._process_counts(),
        )

    def register_namespace(self, model: str, namespace: str) -> None:
        self._ask(Register(encode_name(model), encode_name(namespace)), Namespaces)

    def namespaces(self) -> Mapping[str, str]:
        named = self._ask(Register(b"", b""), Namespaces).namespaces
        return {decode_name(model): decode_name(namespace) for model, namespace in named.items()}

    def check(self) -> None:
        self._ask(GetStats(), Stats)

    def close(self) -> None:
        self._connection.close()
        self._waiting.close()

    def _ask(self, request: Request, reply_type: type[R]) -> R:
        return self._connection.call(request, reply_type)[0]

    def _begin(self, request: Begin) -> tuple[Begun, MappedArena] | None:
        """Begin a write; return None if an entry exists that this release can read."""
        deadline_s = time.monotonic() + OTHERS_WRITE_S
        while True:
            reply, arena = self._connection.call(request, Begun)
            if reply.number:
                return reply, arena
            match Refusal(reply.refusal):
                case Refusal.THERE:
                    if self._is_readable(request.digest):
                        return None
                    request = msgspec.structs.replace(request, replace=True)
                    continue
                case Refusal.TOO_LARGE:
                    raise EntryTooLarge(f"it has {request.size_bytes} bytes")
                case Refusal.FULL:
                    raise StoreUnavailable(f"{self!r} is full: all entries are in use")
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise StoreUnavailable(f"another process has not written it in {OTHERS_WRITE_S} s")
            self._waiting.wait(Wait([request.digest], left_s))

    def _is_readable(self, digest: bytes) -> bool:
        """Return whether an entry is still there, and of this format."""
        [header] = self._ask(Find([digest]), Headers).headers
        try:
            parse_header(header)
        except CorruptEntry:
            return False
        return True

    def _write(self, key: EntryKey, entry: Entry, begun: Begun, arena: MappedArena) -> bool:
        header = b""  # gives up the write
        try:
            parts = arena.parts(begun.extents, entry.data.nbytes)
            header = encode_header(key, entry, copy_in(entry.data, parts))
        finally:
            arena.writes.discard(begun.number)
            done, _ = self._connection.call(End(begun.number, header), Done, within=arena)
        return done.number == 1

    def _entry(self, key: EntryKey, arena: MappedArena, pin: Pin) -> Entry:
        """Return a pinned entry.

        Raises:
            CorruptEntry: it is not the entry of this key. The pin stays.
        """
        info = parse_header(pin.header)
        if info.key != key:
            raise CorruptEntry("it is another key's entry")
        try:
            parts = arena.parts(pin.extents, info.payload_bytes)
        except BadMessage as error:
            raise CorruptEntry(str(error)) from None
        if len(parts) == 1:
            [part] = parts
            data = part.data.toreadonly()
        else:
            data = copy_out(parts, self._buffers.take_buffer(info.payload_bytes)).toreadonly()
        if random.random() < self.options.verify and checksum(data) != info.checksum:  # noqa: S311
            raise CorruptEntry("its checksum does not match its payload")
        if len(parts) == 1:
            weakref.finalize(part, arena.released.append, pin.number)
        else:
            arena.released.append(pin.number)
        return Entry(data, info.dtype, info.shape, info.modality, info.metadata)

    def _problem(self, info: EntryInfo) -> str | None:
        """Return why an entry is corrupt; None if it is not, or is gone."""
        reply, arena = self._connection.call(Read([key_digest(info.key)]), Pins)
        [pin] = reply.pins
        if not pin.number:
            return None
        try:
            found = parse_header(pin.header)
            digest = xxhash.xxh3_64()
            for part in arena.parts(pin.extents, found.payload_bytes):
                digest.update(part.data)
        except (CorruptEntry, BadMessage) as error:
            return str(error)
        else:
            same = digest.hexdigest() == found.checksum
            return None if same else "its checksum does not match its payload"
        finally:
            arena.released.append(pin.number)

    def _find(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        seconds = min(seconds, LONGEST_S)
        headers = [
            header
            for digests in digest_chunks(keys)
            for header in self._ask(Find(digests, seconds), Headers).headers
        ]
        return list(map(entry_info, keys, headers))

    def _claims(
        self, keys: Sequence[EntryKey], owner: str, seconds: float, *, find: bool
    ) -> Iterator[ClaimKeys]:
        named, seconds = owner_bytes(owner), min(seconds, LONGEST_CLAIM_S)
        for digests in digest_chunks(keys):
            yield ClaimKeys(digests, named, seconds, find)

    def _rows(self) -> Iterator[Row]:
        after = b""
        while rows := self._ask(List(after), Page).rows:
            yield from rows
            after = rows[-1].digest


def copy_in(data: memoryview, parts: Sequence[Bytes]) -> str:
    """Copy bytes into parts of the memory, and return their checksum, as `checksum` does.

    Each chunk is hashed while it is in the core's cache. numpy and xxhash work without the
    interpreter's lock.
    """
    source, digest, begin = np.frombuffer(data, np.uint8), xxhash.xxh3_64(), 0
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            chunk = part[start : start + CHUNK_BYTES]
            np.copyto(chunk, source[begin : begin + len(chunk)])
            digest.update(chunk.data)
            begin += len(chunk)
    return digest.hexdigest()


def copy_out(parts: Sequence[Bytes], buffer: memoryview) -> memoryview:
    """Copy parts of the memory into a buffer, and return it."""
    target, begin = np.frombuffer(buffer, np.uint8), 0
    for part in parts:
        np.copyto(target[begin : begin + len(part)], part)
        begin += len(part)
    return buffer


def _listed(row: Row) -> Listed:
    info, problem, skipped = None, None, None
    try:
        info = parse_header(row.header)
    except OtherFormat as error:
        skipped = str(error)
    except CorruptEntry as error:
        problem = str(error)
    size = row.taken_bytes + len(row.header)
    return Listed(row.digest.hex(), info, size, time.time() - row.idle_s, problem, skipped)
