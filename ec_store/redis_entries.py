"""Reading, writing and removing entries in Redis, each of which is one value.

Redis evicts and expires values, never parts of one: an entry is there whole or not at all. A large
one is read by `GETRANGE`, window after window, into memory that is used again.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ec_store.buffers import Buffers
from ec_store.entry import Entry, EntryInfo, checksum, decode, header_length, read_header
from ec_store.errors import CorruptEntry
from ec_store.forks import after_fork
from ec_store.keys import EntryKey
from ec_store.redis_client import RedisClient
from ec_store.redis_link import Command, Reply
from ec_store.redis_names import Names, entry_digest

ID_BYTES = 16
"""Random bytes before each entry, different for every write. A reader sees by them that an entry
was replaced between two windows, also by an equal one, and a writer that an entry is its own."""

HEAD_BYTES = 2048
"""Bytes that are read of an entry to see its header; a longer header costs a second round trip."""

FIRST_BYTES = 2**20
"""Bytes that a `get` reads in its first round trip: all of a small entry."""

WINDOW_BYTES = 2**20
"""Bytes of a reply. The allocator of Redis returns buffers from 8 MiB on to the system at once, so
that each would be cleared again by the kernel."""

WINDOWS = 4
"""Replies on their way at a time: enough to keep the connection busy, and a bound on what the
server holds for a client, which counts towards `maxmemory`."""

REFRESH_BELOW = 0.9
"""A use sets the time to live again when less than this part of it is left. So it is between 0.9
and 1 of `ttl` after the last use, for one more round trip in thousands."""

SCAN_BATCH = 512
"""Keys that SCAN looks at in one step: some 0.1 ms, in which Redis answers no other client."""

NO_KEY = -2


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of an entry.

    Attributes:
        write_id: the random bytes of its write.
        blob: up to `FIRST_BYTES` of it, or its header where that is longer.
        left_ms: its time to live.
    """

    write_id: bytes
    blob: bytes
    left_ms: int


class RedisEntries:
    """The entries of a store. Every method raises StoreUnavailable."""

    def __init__(self, client: RedisClient, names: Names, ttl_ms: int) -> None:
        self._client = client
        self._names = names
        self._ttl_ms = ttl_ms
        self._buffers = Buffers()
        after_fork(self._renew_locks)

    def _renew_locks(self) -> None:
        self._buffers.renew_locks()

    def write(
        self, digest: str, header: bytes, payload: memoryview, *, replace: bool = False
    ) -> bool:
        """Write an entry; False where a sound one was there already: it is kept, and used.

        One round trip; one more to refresh the other's time to live, or to replace what is no
        entry.
        """
        name, write_id = self._names.entry(digest), secrets.token_bytes(ID_BYTES)
        value = (write_id + header, payload)
        if replace:
            self._client.run([("SET", name, value, "PX", self._ttl_ms)])
            return True
        written, there, *found = self._client.run(
            [
                ("SET", name, value, "NX", "PX", self._ttl_ms),
                self._id(digest),
                *self.look([digest]),
                ("PTTL", name),
            ]
        )
        # What was sent again because the reply was lost finds what it wrote itself.
        if written is not None or there == write_id:
            return True
        if self._used([digest], found, 0)[0] is not None:
            return False
        return self.write(digest, header, payload, replace=True)

    def use(self, digests: Sequence[str], seconds: float) -> list[EntryInfo | None]:
        """What the headers say of entries that do not expire for `seconds` from now.

        One round trip, and one more where the time to live of any has to be set.
        """
        ages: list[Command] = [("PTTL", self._names.entry(digest)) for digest in digests]
        return self._used(digests, self._client.run([*self.look(digests), *ages]), seconds)

    def _used(
        self, digests: Sequence[str], replies: Sequence[Reply], seconds: float
    ) -> list[EntryInfo | None]:
        """As `use`, from the replies to `look` and, behind them, `PTTL`."""
        infos = self.infos(digests, replies[: len(digests)])
        least_ms = max(int(seconds * 1000), int(REFRESH_BELOW * self._ttl_ms))
        short = [
            place
            for place, (info, left_ms) in enumerate(
                zip(infos, replies[len(digests) :], strict=True)
            )
            if info and left_ms < least_ms
        ]
        ms = max(int(seconds * 1000), self._ttl_ms)
        kept = self._client.run(
            [("PEXPIRE", self._names.entry(digests[place]), ms) for place in short]
        )
        for place, done in zip(short, kept, strict=True):
            if not done:  # evicted between the two
                infos[place] = None
        return infos

    def infos(
        self, digests: Sequence[str], looked: Sequence[bytes] | None = None
    ) -> list[EntryInfo | None]:
        """What the headers say; None where there is no entry with a valid header.

        Args:
            digests: of which entries.
            looked: the replies to `look`, where they are there already.
        """
        heads = self._client.run(self.look(digests)) if looked is None else list(looked)
        pairs = zip(digests, self._completed(digests, heads), strict=True)
        return [info_or_none(digest, head) for digest, head in pairs]

    def look(self, digests: Sequence[str]) -> list[Command]:
        """The commands whose replies `infos` reads."""
        return [self._range(digest, 0, HEAD_BYTES) for digest in digests]

    def _range(self, digest: str, start: int, size: int) -> Command:
        """The command that reads `size` bytes from byte `start` of an entry on."""
        first = ID_BYTES + start
        return ("GETRANGE", self._names.entry(digest), first, first + size - 1)

    def _id(self, digest: str) -> Command:
        return ("GETRANGE", self._names.entry(digest), 0, ID_BYTES - 1)

    def heads(self, digests: Sequence[str]) -> list[bytes]:
        """Entries up to the end of the header at least, empty where there is none."""
        return self._completed(digests, self._client.run(self.look(digests)))

    def _completed(self, digests: Sequence[str], heads: list[bytes]) -> list[bytes]:
        """Heads that end within a long header, up to its end."""
        longer: dict[int, Command] = {}
        for place, head in enumerate(heads):
            with suppress(CorruptEntry):
                end = header_length(memoryview(head))
                if end > len(head) > 0:
                    longer[place] = self._range(digests[place], 0, end)
        for place, head in zip(longer, self._client.run(list(longer.values())), strict=True):
            heads[place] = head
        return heads

    def begin(self, digest: str) -> Beginning | None:
        """The beginning of what is kept under the name of an entry; None where there is nothing."""
        write_id, first, left_ms = self._client.run(
            [
                self._id(digest),
                self._range(digest, 0, FIRST_BYTES),
                ("PTTL", self._names.entry(digest)),
            ]
        )
        if left_ms == NO_KEY:
            return None
        return Beginning(write_id, self._completed([digest], [first])[0], left_ms)

    def read(self, key: EntryKey, beginning: Beginning) -> Entry:
        """An entry of which `begin` has read the beginning.

        Raises:
            CorruptEntry: this is not the entry of this key, or was replaced or evicted meanwhile.
        """
        first = beginning.blob
        if len(first) < FIRST_BYTES:
            return decode(key, memoryview(first))
        info = read_header(memoryview(first))
        if info.key != key:
            raise CorruptEntry("it is another key's entry")
        payload = self._buffers.take(info.payload_bytes)
        there = min(len(first) - info.header_bytes, len(payload))
        payload[:there] = memoryview(first)[info.header_bytes :][:there]
        self._fill(payload[there:], key.digest, info.header_bytes + there)
        if checksum(payload) != info.checksum:
            raise CorruptEntry("its checksum does not fit its payload")
        return Entry(payload.toreadonly(), info.dtype, info.shape, info.modality, info.metadata)

    def _fill(self, room: memoryview, digest: str, offset: int) -> None:
        starts = range(0, len(room), WINDOW_BYTES)
        rooms = [room[start : start + WINDOW_BYTES] for start in starts]
        commands: list[Command] = [
            self._range(digest, offset + start, len(piece))
            for start, piece in zip(starts, rooms, strict=True)
        ]
        lengths = self._client.run(commands, window=WINDOWS, into=rooms)
        if lengths != list(map(len, rooms)):
            raise CorruptEntry("it is shorter than its header says")

    def is_still(self, digest: str, beginning: Beginning) -> bool:
        """Whether an entry is neither replaced nor gone since its beginning was read."""
        [write_id] = self._client.run([self._id(digest)])
        return bool(write_id == beginning.write_id)

    def refresh(self, digest: str, left_ms: int) -> None:
        """Set the time to live of an entry that was used, where much of it is over."""
        if left_ms < REFRESH_BELOW * self._ttl_ms:
            self._client.run([("PEXPIRE", self._names.entry(digest), self._ttl_ms)])

    def forget(self, digests: Sequence[str]) -> int:
        """Remove entries; how many there were."""
        return sum(self._client.run([("UNLINK", self._names.entry(each)) for each in digests]))

    def scan(self) -> Iterator[dict[str, bytes]]:
        """Digest and head of every entry, each once, in batches."""
        seen: set[str] = set()
        for found in self._client.scan(self._names.entries, SCAN_BATCH):
            new = list({digest for name in found if (digest := entry_digest(name))} - seen)
            seen.update(new)
            heads = self.heads(new)
            yield {digest: head for digest, head in zip(new, heads, strict=True) if head}

    def sizes(self, digests: Sequence[str]) -> list[int]:
        """Bytes of each entry, header included; 0 where there is none."""
        values = self._client.run([("STRLEN", self._names.entry(digest)) for digest in digests])
        return [max(0, size - ID_BYTES) for size in values]

    def close(self) -> None:
        """Release the memory that is not in use."""
        self._buffers = Buffers()


def info_of(digest: str, head: bytes) -> EntryInfo:
    """What the header at the beginning of an entry says.

    Raises:
        CorruptEntry: it is not a header of the entry of this digest.
    """
    info = read_header(memoryview(head))
    if info.key.digest != digest:
        raise CorruptEntry("it is another key's entry")
    return info


def info_or_none(digest: str, head: bytes) -> EntryInfo | None:
    """As `info_of`, None in place of the error."""
    try:
        return info_of(digest, head)
    except CorruptEntry:
        return None
