"""Writing, reading and removing the parts of an entry in Redis."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ec_store.entry import Entry, decode, header_length
from ec_store.errors import CorruptEntry, StoreUnavailable
from ec_store.redis_client import RedisClient, Refused
from ec_store.redis_layout import FRAME_BYTES, Frame, Manifest, Names
from ec_store.redis_link import Command

HEAD_BYTES = 2048
"""What is read of a manifest to see its header; a header that is longer costs a second look."""

WINDOW = 3
"""Chunks on their way at a time: enough to keep the connection busy, and a bound on what the server
holds for a client, which counts towards `maxmemory`."""

STAGING_MS = 60_000
"""How long a chunk lives that no manifest names: what a writer leaves that was killed."""

CHUNK_SLACK_MS = 60_000
"""Chunks outlive their manifest by this, so that no expiry leaves half an entry."""


class PartMissing(CorruptEntry):
    """A chunk is gone: Redis evicted it, or someone deleted the entry. Nobody wrote nonsense."""


class RedisEntries:
    """The parts of entries."""

    def __init__(self, client: RedisClient, names: Names, chunk_bytes: int) -> None:
        self._client = client
        self._names = names
        self._chunk_bytes = chunk_bytes

    def write(
        self, digest: str, header: bytes, payload: memoryview, ms: int, *, replace: bool = False
    ) -> bool:
        """Write an entry that lives for `ms`; False where another one is there.

        With `replace` it takes the other's place, whose chunks expire by themselves.

        Raises:
            StoreUnavailable: it could not be written.
        """
        frame = Frame.new(payload.nbytes, self._chunk_bytes)
        chunks = self._names.chunks(digest, frame, payload.nbytes)
        manifest = self._names.manifest(digest)
        value = frame.encode() + header + (b"" if chunks else payload)
        try:
            self._write_chunks(chunks, payload)
            *kept, written = self._client.run(
                [
                    *(("PEXPIRE", chunk, ms + CHUNK_SLACK_MS) for chunk in chunks),
                    ("SET", manifest, value, *(() if replace else ("NX",)), "PX", ms),
                ]
            )
        except Refused:
            # Of a server that cannot be reached nothing more is asked: what it has of this expires.
            self._unlink(chunks)
            raise
        # What was sent again after a reply was lost finds the manifest that it wrote itself.
        if written is None and self.frame(digest) != frame:
            self._unlink(chunks)
            return False
        if not all(kept):
            self._unlink([manifest, *chunks])
            raise StoreUnavailable("Redis is full: it evicts what is being written")
        return True

    def _write_chunks(self, names: Sequence[bytes], payload: memoryview) -> None:
        size = self._chunk_bytes
        self._client.run(
            [
                ("SET", name, payload[place * size : (place + 1) * size], "PX", STAGING_MS)
                for place, name in enumerate(names)
            ],
            window=WINDOW,
        )

    def _unlink(self, names: Sequence[bytes]) -> None:
        with suppress(StoreUnavailable):
            self._client.run([("UNLINK", name) for name in names])

    def read(self, manifest: Manifest, value: bytes) -> Entry:
        """The entry of a manifest, whose value is `value`.

        Raises:
            CorruptEntry: a part of it is missing or not what it was.
        """
        info, size = manifest.info, manifest.frame.chunk_bytes
        body = memoryview(value)[FRAME_BYTES:]
        if not size:
            return decode(info.key, body)
        if len(body) != info.header_bytes:
            raise CorruptEntry("its manifest has another length")
        blob = memoryview(bytearray(info.size_bytes))
        blob[: info.header_bytes] = body
        payload = blob[info.header_bytes :]
        names = self._names.chunks(info.key.digest, manifest.frame, info.payload_bytes)
        rooms = [payload[place * size : (place + 1) * size] for place in range(len(names))]
        lengths = self._client.run([("GET", name) for name in names], window=WINDOW, into=rooms)
        for place, (length, room) in enumerate(zip(lengths, rooms, strict=True)):
            if length is None:
                raise PartMissing(f"chunk {place} is missing")
            if length != len(room):
                raise CorruptEntry(f"chunk {place} has another length")
        return decode(info.key, blob)

    def heads(self, digests: Sequence[str]) -> list[bytes]:
        """Manifests up to the end of the header, empty where there is none."""
        return self._completed(digests, self._client.run(self.look(digests)))

    def look(self, digests: Sequence[str]) -> list[Command]:
        """What to ask for their manifests; the replies are for `manifests`."""
        names = [self._names.manifest(digest) for digest in digests]
        return [("GETRANGE", name, 0, HEAD_BYTES - 1) for name in names]

    def _completed(self, digests: Sequence[str], heads: list[bytes]) -> list[bytes]:
        """Heads that may end within a long header, whole."""
        longer: dict[int, Command] = {}
        for place, head in enumerate(heads):
            with suppress(CorruptEntry):
                end = FRAME_BYTES + header_length(memoryview(head)[FRAME_BYTES:])
                if end > HEAD_BYTES == len(head):
                    name = self._names.manifest(digests[place])
                    longer[place] = ("GETRANGE", name, 0, end - 1)
        for place, head in zip(longer, self._client.run(list(longer.values())), strict=True):
            heads[place] = head
        return heads

    def manifests(
        self, digests: Sequence[str], looked: list[bytes] | None = None
    ) -> list[Manifest | None]:
        """Manifests; None where there is none that can be trusted.

        Args:
            digests: of which entries.
            looked: the replies to `look`, where it was asked already.
        """
        heads = self.heads(digests) if looked is None else self._completed(digests, looked)
        pairs = zip(digests, heads, strict=True)
        return [manifest_or_none(head, digest) for digest, head in pairs]

    def frame(self, digest: str) -> Frame | None:
        """How an entry is kept that is there now."""
        name = self._names.manifest(digest)
        [head] = self._client.run([("GETRANGE", name, 0, FRAME_BYTES - 1)])
        with suppress(CorruptEntry):
            return Frame.read(memoryview(head))
        return None

    def expire(self, wanted: Sequence[tuple[Manifest, int]]) -> Iterator[bool]:
        """Set times to live, in milliseconds; whether each entry is there with all its parts."""
        commands: list[Command] = []
        ends = []
        for manifest, ms in wanted:
            *chunks, name = self._parts(manifest)
            commands += [("PEXPIRE", chunk, ms + CHUNK_SLACK_MS) for chunk in chunks]
            commands.append(("PEXPIRE", name, ms))
            ends.append(len(commands))
        replies = self._client.run(commands)
        return (all(replies[start:end]) for start, end in zip([0, *ends], ends, strict=False))

    def forget(self, heads: Mapping[str, bytes]) -> int:
        """Remove entries with all their parts, as far as their heads tell; how many there were."""
        manifests = [self._names.manifest(digest) for digest in heads]
        chunks = [
            chunk
            for digest, head in heads.items()
            if (manifest := manifest_or_none(head, digest))
            for chunk in self._parts(manifest)[:-1]
        ]
        replies = self._client.run([("UNLINK", name) for name in [*manifests, *chunks]])
        return sum(replies[: len(manifests)])

    def _parts(self, manifest: Manifest) -> list[bytes]:
        """Names of the chunks and, last, the manifest."""
        info, digest = manifest.info, manifest.info.key.digest
        chunks = self._names.chunks(digest, manifest.frame, info.payload_bytes)
        return [*chunks, self._names.manifest(digest)]


def manifest_or_none(head: bytes, digest: str) -> Manifest | None:
    """The manifest of this entry, None where this is not it."""
    try:
        return Manifest.read(memoryview(head), digest)
    except CorruptEntry:
        return None
