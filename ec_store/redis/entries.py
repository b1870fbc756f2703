"""Entries in Redis, each as one value: reading, writing and removal.

Redis evicts and expires whole values: an entry exists whole or not at all. A large entry is read
with `GETRANGE`, window by window, into reused memory.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ec_store.buffers import Buffers
from ec_store.entry import (
    Entry,
    EntryInfo,
    checksum,
    decode,
    header_length,
    read_header,
    verified_entry,
)
from ec_store.errors import CorruptEntry
from ec_store.keys import EntryKey
from ec_store.redis.client import RedisClient
from ec_store.redis.connection import Command, Reply
from ec_store.redis.names import RedisNames, entry_digest

ID_BYTES = 16
"""Random bytes before each entry, different for every write. They show a reader that an entry was
replaced between two windows, even by an equal one, and a writer that an entry is its own."""

HEAD_BYTES = 2048
"""Bytes of an entry that are read for its header; a longer header costs a second round trip."""

WINDOW_BYTES = 2**20
"""Bytes of one reply: the first one has the whole of a small entry. The allocator of Redis returns
buffers of 8 MiB or more to the system at once, so that the kernel would clear each of them again.
"""

REFRESH_BELOW = 0.9
"""Share of the time to live below which a use renews it. So an entry expires between 0.9 and 1 of
`ttl` after its last use, and few uses cost another round trip."""

SCAN_BATCH = 512
"""Keys that SCAN visits in one step: some 0.1 ms, during which Redis serves no other client."""

NO_KEY = -2


@dataclass(frozen=True, slots=True)
class Beginning:
    """First bytes of an entry.

    Attributes:
        write_id: random bytes of its write.
        blob: the first window of it, or the header if that is longer.
        left_ms: remaining time to live in milliseconds.
    """

    write_id: bytes
    blob: bytes
    left_ms: int


class RedisEntries:
    """Entries of one store. Every method may raise StoreUnavailable."""

    def __init__(
        self,
        client: RedisClient,
        names: RedisNames,
        ttl_ms: int,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._client = client
        self._names = names
        self._ttl_ms = ttl_ms
        self._window_bytes = window_bytes
        self._buffers = Buffers()

    def write(
        self, digest: str, header: bytes, payload: memoryview, *, replace: bool = False
    ) -> bool:
        """Write an entry; False if a valid one exists: it stays, and counts as used.

        One round trip. A second one renews the existing entry's time to live, or replaces an
        invalid value.
        """
        name, write_id = self._names.entry(digest), secrets.token_bytes(ID_BYTES)
        value = (write_id + header, payload)
        if replace:
            self._client.run([("SET", name, value, "PX", self._ttl_ms)])
            return True
        written, existing, *found = self._client.run(
            [
                ("SET", name, value, "NX", "PX", self._ttl_ms),
                self._id(digest),
                *self.info_commands([digest]),
                ("PTTL", name),
            ]
        )
        # A command that was repeated after a lost reply finds its own first write.
        if written is not None or existing == write_id:
            return True
        if self._read_uses([digest], found, 0)[0] is not None:
            return False
        return self.write(digest, header, payload, replace=True)

    def use_entries(self, digests: Sequence[str], seconds: float) -> list[EntryInfo | None]:
        """Return the headers' fields of entries, which do not expire for `seconds` from now.

        One round trip, and a second one if the time to live of any entry has to be set.
        """
        ages: list[Command] = [("PTTL", self._names.entry(digest)) for digest in digests]
        replies = self._client.run([*self.info_commands(digests), *ages])
        return self._read_uses(digests, replies, seconds)

    def _read_uses(
        self, digests: Sequence[str], replies: Sequence[Reply], seconds: float
    ) -> list[EntryInfo | None]:
        """Process the replies to `info_commands`, followed by those to `PTTL`, as `use_entries`."""
        infos = self.parse_infos(digests, replies[: len(digests)])
        least_ms = max(int(seconds * 1000), int(REFRESH_BELOW * self._ttl_ms))
        left_ms = replies[len(digests) :]
        short = [place for place, info in enumerate(infos) if info and left_ms[place] < least_ms]
        ms = max(int(seconds * 1000), self._ttl_ms)
        names = [self._names.entry(digests[place]) for place in short]
        kept = self._client.run([("PEXPIRE", name, ms) for name in names])
        for place, done in zip(short, kept, strict=True):
            if not done:  # evicted between the two
                infos[place] = None
        return infos

    def parse_infos(
        self, digests: Sequence[str], replies: Sequence[bytes]
    ) -> list[EntryInfo | None]:
        """Return the headers' fields in the replies to `info_commands`; None if invalid."""
        pairs = zip(digests, self._completed(digests, list(replies)), strict=True)
        return [info_or_none(digest, head) for digest, head in pairs]

    def info_commands(self, digests: Sequence[str]) -> list[Command]:
        """Return the commands that `parse_infos` needs, one for each entry."""
        return [self._range(digest, 0, HEAD_BYTES) for digest in digests]

    def _range(self, digest: str, start: int, size: int) -> Command:
        first = ID_BYTES + start
        return ("GETRANGE", self._names.entry(digest), first, first + size - 1)

    def _id(self, digest: str) -> Command:
        return ("GETRANGE", self._names.entry(digest), 0, ID_BYTES - 1)

    def _completed(self, digests: Sequence[str], heads: list[bytes]) -> list[bytes]:
        """Replace heads that end within a long header by longer ones."""
        longer: dict[int, Command] = {}
        for place, head in enumerate(heads):
            with suppress(CorruptEntry):
                end = header_length(head)
                if end > len(head) > 0:
                    longer[place] = self._range(digests[place], 0, end)
        for place, head in zip(longer, self._client.run(list(longer.values())), strict=True):
            heads[place] = head
        return heads

    def read_beginning(self, digest: str) -> Beginning | None:
        """Read the first bytes of an entry; None if there is no such value."""
        write_id, first, left_ms = self._client.run(
            [
                self._id(digest),
                self._range(digest, 0, self._window_bytes),
                ("PTTL", self._names.entry(digest)),
            ]
        )
        if left_ms == NO_KEY:
            return None
        return Beginning(write_id, self._completed([digest], [first])[0], left_ms)

    def read(self, key: EntryKey, beginning: Beginning) -> Entry:
        """Read an entry, from the first bytes that `read_beginning` has read.

        Raises:
            CorruptEntry: the bytes are not the entry of this key, or it was replaced or evicted
                meanwhile.
        """
        first = beginning.blob
        if len(first) < self._window_bytes:
            return decode(key, memoryview(first))
        info = read_header(first, key.digest)
        payload = self._buffers.take_buffer(info.payload_bytes)
        received = min(len(first) - info.header_bytes, len(payload))
        payload[:received] = memoryview(first)[info.header_bytes :][:received]
        self._fill(payload[received:], key.digest, info.header_bytes + received)
        return verified_entry(info, payload, checksum(payload))

    def _fill(self, room: memoryview, digest: str, offset: int) -> None:
        size = self._window_bytes
        starts = range(0, len(room), size)
        rooms = [room[start : start + size] for start in starts]
        commands: list[Command] = [
            self._range(digest, offset + start, len(piece))
            for start, piece in zip(starts, rooms, strict=True)
        ]
        lengths = self._client.run(commands, into=rooms)
        if lengths != list(map(len, rooms)):
            raise CorruptEntry("it is shorter than its header says")

    def is_still(self, digest: str, beginning: Beginning) -> bool:
        """Return whether an entry exists and has not been replaced since `read_beginning`."""
        [write_id] = self._client.run([self._id(digest)])
        return bool(write_id == beginning.write_id)

    def refresh_ttl(self, digest: str, left_ms: int) -> None:
        """Renew the time to live of a used entry, if less than `REFRESH_BELOW` of it is left."""
        if left_ms < REFRESH_BELOW * self._ttl_ms:
            self._client.run([("PEXPIRE", self._names.entry(digest), self._ttl_ms)])

    def remove_entries(self, digests: Sequence[str]) -> int:
        return sum(self._client.run([("UNLINK", self._names.entry(each)) for each in digests]))

    def scan(self) -> Iterator[dict[str, bytes]]:
        """Yield digest and head of every entry once, in batches."""
        seen: set[str] = set()
        for found in self._client.scan(self._names.entries, SCAN_BATCH):
            new = list({digest for name in found if (digest := entry_digest(name))} - seen)
            seen.update(new)
            heads = self._completed(new, self._client.run(self.info_commands(new)))
            yield {digest: head for digest, head in zip(new, heads, strict=True) if head}

    def sizes(self, digests: Sequence[str]) -> list[int]:
        values = self._client.run([("STRLEN", self._names.entry(digest)) for digest in digests])
        return [max(0, size - ID_BYTES) for size in values]


def info_or_none(digest: str, head: bytes) -> EntryInfo | None:
    """Return the header's fields; None if it is invalid, or not of the entry of this digest."""
    try:
        return read_header(head, digest)
    except CorruptEntry:
        return None
