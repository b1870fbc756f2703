"""Store in the memory of a host, which `ec-store serve` owns."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ec_store.arena.checksums import checksum_of
from ec_store.arena.connection import ArenaConnection, MappedArena
from ec_store.arena.extents import Extent
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
    parse_header,
    read_header,
    release_request,
    stats_of,
)
from ec_store.arena.index import Refusal
from ec_store.arena.memory import Bytes, copy_in, in_one_part
from ec_store.arena.protocol import (
    ArenaRequest,
    Begin,
    Begun,
    Delete,
    Discard,
    End,
    GetStats,
    List,
    Message,
    Pin,
    Purge,
    Read,
    Register,
    Role,
    Row,
)
from ec_store.arena.url import ArenaOptions
from ec_store.base import LONGEST_S, Listed, Store, StoreStats
from ec_store.buffers import Buffers
from ec_store.counts import Counts
from ec_store.entry import Entry, EntryInfo, HeldEntry
from ec_store.errors import CorruptEntry, EntryTooLarge, StoreUnavailable
from ec_store.keys import EntryKey, encode_name

R = TypeVar("R", bound=Message)

OTHERS_WRITE_S = 10.0
"""Time in seconds that `put` waits for another process that writes the same entry."""

ASK_AGAIN_S = (0.001, 0.002, 0.005, *repeat(0.01, 100), 0.05)
"""Delays in seconds between two requests for an entry that is being written, or comes from the
tier; the last one is repeated."""


class ArenaStore(Store):
    """Store of entries in a host's memory. Thread-safe, also after forks.

    It connects at the first call. Payloads are copied here, between this process's memory and the
    host's; everything else is one round trip to the server.

    Attributes:
        options: options of its URL.
        connection: its connection, with the memory that is mapped.
    """

    def __init__(self, options: ArenaOptions, role: Role = "writer") -> None:
        """Create a store; the first call connects it. A `reader` writes no entries."""
        self.options = options
        self.connection = ArenaConnection(options.path, role, options.timeout_s)
        self._buffers = Buffers()
        self.counts = Counts()

    def __repr__(self) -> str:
        return f"ArenaStore({self.options.path})"

    def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        """Write an entry (see `Store.put`).

        If another process is writing it, wait until it is there, for `OTHERS_WRITE_S` at most.
        """
        data = entry.data.cast("B")
        write = self.begin(key, data.nbytes, replace=replace)
        if write is None:
            return False
        try:
            copy_in(data, write.parts)
        except BaseException:
            write.abort()
            raise
        return write.commit(entry)

    def begin(
        self, key: EntryKey, size_bytes: int, *, replace: bool = False
    ) -> "EntryWrite | None":
        """Begin to write an entry of this size in place; return None if one exists.

        Waits and errors are those of `put`.
        """
        try:
            begun = self._begin(
                Begin(key_digest(key), encode_name(key.namespace), size_bytes, replace)
            )
            return begun and EntryWrite(self, key, size_bytes, *begun)
        except (StoreUnavailable, EntryTooLarge):
            self.counts.add(drops=1)
            raise

    def get(self, key: EntryKey) -> Entry | None:
        """Return an entry (see `Store.get`).

        Its bytes are a view of the host's memory, pinned until the last view of them is deleted.
        An entry in several extents is copied. The pin is this process's: a child of `fork` must
        get the entry again, because inherited bytes may change once the parent has ended.
        """
        pinned = self.pin(key)
        if pinned is None:
            return None
        data = in_one_part(pinned.parts, self._buffers).toreadonly()
        return Entry(data, pinned.dtype, pinned.shape, pinned.modality, pinned.metadata)

    def pin(self, key: EntryKey) -> "PlacedEntry | None":
        """Return an entry in place (see `Store.get`): nothing is copied.

        It is pinned until the last view of its bytes is deleted. For an entry that comes from the
        tier, it waits for half of `timeout_s`: then it is a miss, and not yet late for a caller
        with that timeout.
        """
        pin, arena = self._read(key_digest(key))
        entry = None
        if pin.number:
            try:
                entry = self._pinned(key, arena, pin)
            except CorruptEntry:
                self.counts.add(corrupt=1)
                try:
                    self.connection.call(Discard(pin.number), within=arena)
                finally:
                    self.connection.release(arena, pin.number)
            except BaseException:  # a signal
                self.connection.release(arena, pin.number)
                raise
        self.counts.add(misses=entry is None, hits=entry is not None)
        return entry

    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        return entry_infos(keys, self._ask(find_request(keys)).headers)

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        return entry_infos(keys, self._ask(find_request(keys, seconds)).headers)

    def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        """Claim entries (see `Store.claim`). A claim ends with this store's connection too."""
        reply = self._ask(claim_request(keys, owner, seconds, find=False))
        return of_each(keys, reply.claims)

    def claim_or_find(
        self, keys: Sequence[EntryKey], owner: str, seconds: float
    ) -> list[EntryInfo | bool]:
        """Claim missing entries (see `Store.claim_or_find`), in one round trip."""
        reply = self._ask(claim_request(keys, owner, seconds, find=True))
        return found_or_claimed(keys, reply.headers, reply.claims)

    def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        self._ask(release_request(keys, owner))

    def delete(self, keys: Sequence[EntryKey]) -> int:
        return self._ask(Delete(key_digests(keys))).number

    def purge(self, namespace: str) -> int:
        return self._ask(Purge(encode_name(namespace))).number

    def ls(self) -> Iterator[Listed]:
        """Yield every entry, in the order of their digests."""
        for row in self._rows():
            yield _listed(row)

    def verify(self, *, fix: bool = False) -> Iterator[Listed]:
        for row in self._rows():
            yield replace(_listed(row), problem=self._problem(row.digest, fix=fix))

    def stats(self) -> StoreStats:
        return stats_of(self._ask(GetStats()), self.counts)

    def register_namespace(self, model: str, namespace: str) -> None:
        self._ask(Register(encode_name(model), encode_name(namespace)))

    def namespaces(self) -> Mapping[str, str]:
        return namespaces_of(self._ask(Register(b"", b"")))

    def check(self) -> None:
        self._ask(find_request([]))

    def close(self) -> None:
        self.connection.close()

    def _ask(self, request: ArenaRequest[R]) -> R:
        return self.connection.call(request)[0]

    def _begin(self, request: Begin) -> tuple[Begun, MappedArena] | None:
        """Begin a write; return None if the entry exists."""
        for _ in _attempts(OTHERS_WRITE_S):
            reply, arena = self.connection.call(request)
            if reply.number:
                return reply, arena
            match Refusal(reply.refusal):
                case Refusal.THERE:
                    return None
                case Refusal.TOO_LARGE:
                    raise EntryTooLarge(f"it has {request.size_bytes} bytes")
                case Refusal.FULL:
                    raise StoreUnavailable(f"{self!r} is full: all entries are in use")
        raise StoreUnavailable(f"another process has not written it in {OTHERS_WRITE_S} s")

    def _read(self, digest: bytes) -> tuple[Pin, MappedArena]:
        """Pin an entry, if it comes from the tier after that, and return the pin."""
        for _ in _attempts(self.options.timeout_s / 2):
            reply, arena = self.connection.call(Read([digest]))
            [pin] = reply.pins
            if pin.number or not pin.header:
                break
        return pin, arena

    def _pinned(self, key: EntryKey, arena: MappedArena, pin: Pin) -> "PlacedEntry":
        """Return a pinned entry.

        Raises:
            CorruptEntry: it is not the entry of this key. The pin stays.
        """
        header = read_header(pin.header)
        if not header.is_of(key):
            raise CorruptEntry("it is another key's entry")
        found = arena.parts(pin.extents, header.payload_bytes)
        if random.random() < self.options.verify:  # noqa: S311
            _verify(found, pin.checksum)
        kept = _Kept(self.connection, arena, pin.number)
        parts = []
        for part in found:
            viewed = part.view(_PinnedBytes)
            viewed.kept = kept
            parts.append(viewed.data.toreadonly())
        place = HostPlace(arena.name, tuple(pin.extents), header.payload_bytes)
        return PlacedEntry(
            header.dtype, header.shape, header.modality, header.metadata, place, parts
        )

    def _problem(self, digest: bytes, *, fix: bool) -> str | None:
        """Return why an entry is corrupt, and delete it with `fix`; None if it is not, or gone."""
        reply, arena = self.connection.call(Read([digest]))
        [pin] = reply.pins
        if not pin.number:
            return None
        try:
            header = read_header(pin.header)
            _verify(arena.parts(pin.extents, header.payload_bytes), pin.checksum)
        except CorruptEntry as error:
            if fix:  # this entry, and none that has replaced it
                self.connection.call(Discard(pin.number), within=arena)
            return str(error)
        else:
            return None
        finally:
            self.connection.release(arena, pin.number)

    def _rows(self) -> Iterator[Row]:
        after = b""
        while rows := self._ask(List(after)).rows:
            yield from rows
            after = rows[-1].digest


class HostPlace(NamedTuple):
    """Place of an entry: extents, in order, of the arena of a name."""

    arena: bytes
    extents: tuple[Extent, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PlacedEntry:
    """Entry in the memory of a host.

    Attributes:
        dtype, shape, modality, metadata, encode_s: as in `Entry`.
        place: where other processes find it in their mapping of the memory.
        parts: its bytes, read-only, in order.
    """

    dtype: str
    shape: tuple[int, ...]
    modality: str
    metadata: Mapping[str, Any]
    place: HostPlace
    parts: Sequence[memoryview]
    encode_s: float = 0.0


class _Kept:
    """Object that exists as long as a pin is needed, and releases it."""

    def __init__(self, connection: ArenaConnection, arena: MappedArena, number: int) -> None:
        self._pin = connection, arena, number

    def __del__(self) -> None:
        connection, arena, number = self._pin
        connection.release(arena, number)


class _PinnedBytes(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a pinned entry, which keep its pin: a view of them refers to this array."""

    kept: _Kept


class EntryWrite:
    """Write of an entry that was begun. Its bytes belong to it until `commit` or `abort`.

    A device that may still be copying must have ended before: the bytes are another entry's then.

    Attributes:
        place: where other processes find it.
        parts: its bytes, in order, to be written.
    """

    def __init__(
        self,
        store: ArenaStore,
        key: EntryKey,
        size_bytes: int,
        begun: Begun,
        arena: MappedArena,
    ) -> None:
        self._store = store
        self._key = key
        self._number, self._arena = begun.number, arena
        self.place = HostPlace(arena.name, tuple(begun.extents), size_bytes)
        try:
            self.parts = arena.parts(begun.extents, size_bytes)
        except (CorruptEntry, StoreUnavailable) as error:
            self.abort()
            raise StoreUnavailable(f"the place of a write is unusable: {error}") from None

    def commit(self, entry: HeldEntry) -> bool:
        """Store the entry; return False if another one of its key was stored first.

        Raises:
            StoreUnavailable: the server is gone, or the connection was lost since `begin`.
        """
        try:
            header = encode_header(self._key, entry)
        except BaseException:  # metadata that are no JSON
            self.abort()
            raise
        try:
            stored = self._end(header, entry.encode_s)
        except StoreUnavailable:
            self._store.counts.add(drops=1)
            raise
        self._store.counts.add(puts=stored)
        return stored

    def abort(self) -> None:
        """Give the write up. If the server is gone, it has ended already."""
        with suppress(StoreUnavailable):
            self._end(b"")

    def _end(self, header: bytes, encode_s: float = 0.0) -> bool:
        self._arena.writes.discard(self._number)
        end = End(self._number, header, min(encode_s, LONGEST_S))
        return self._store.connection.call(end, within=self._arena)[0].number == 1


def _verify(parts: Sequence[Bytes], checksum: str) -> None:
    """Raise CorruptEntry if parts of the memory have another checksum; empty: none is known."""
    if checksum and checksum_of(parts) != checksum:
        raise CorruptEntry("its checksum does not match its payload")


def _listed(row: Row) -> Listed:
    info, problem = None, None
    try:
        info = parse_header(row.header)
    except CorruptEntry as error:
        problem = str(error)
    size = row.taken_bytes + len(row.header)
    return Listed(row.digest.hex(), info, size, time.time() - row.idle_s, problem)


def _attempts(seconds: float) -> Iterator[None]:
    """Yield at once, and again after each delay while less than this time has passed."""
    deadline_s = time.monotonic() + seconds
    yield
    for delay_s in chain(ASK_AGAIN_S, repeat(ASK_AGAIN_S[-1])):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(delay_s, left_s))
        yield
