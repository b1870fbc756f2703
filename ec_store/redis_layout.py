"""Names and bytes of an entry in Redis (docs/redis.md).

    {prefix}:{<digest>}:m                manifest: a frame, the entry's header, a small payload
    {prefix}:{<digest>}:<write id>:<n>   chunk n of a larger payload
    {prefix}:{<digest>}:c                who makes the entry
    {prefix}:namespaces                  hash, served model to namespace

The digest in braces is the hash tag: all parts of an entry are in one cluster slot. Every write has
its own chunks, named for its random id, and the manifest, written last, says which are the entry:
chunks of two writers never mix.
"""

import re
import secrets
import struct
from dataclasses import dataclass
from typing import Self

import xxhash

from ec_store.entry import EntryInfo, read_header
from ec_store.errors import CorruptEntry

_FRAME = struct.Struct("<4sI16sQ")
"""Magic, chunk size, write id, xxh3-64 of these three."""

_MAGIC = b"ECR1"
FRAME_BYTES = _FRAME.size
INLINE_BYTES = 2**20
"""Payloads up to this are in the manifest: one round trip, for the price of one copy."""

_MANIFEST_NAME = re.compile(rb".*:\{([0-9a-f]{64})\}:m", re.DOTALL)
_CHUNK_NAME = re.compile(rb".*:\{([0-9a-f]{64})\}:([0-9a-f]{32}):\d+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Names:
    """Names of keys.

    Attributes:
        prefix: what all begin with.
    """

    prefix: str

    @property
    def namespaces(self) -> bytes:
        """The hash of served models."""
        return f"{self.prefix}:namespaces".encode()

    @property
    def manifests(self) -> bytes:
        """Pattern of all manifests."""
        return f"{self.prefix}:{{*}}:m".encode()

    @property
    def all_chunks(self) -> bytes:
        """Pattern of all chunks."""
        return f"{self.prefix}:{{*}}:*:*".encode()

    def manifest(self, digest: str) -> bytes:
        """The manifest of an entry."""
        return f"{self.prefix}:{{{digest}}}:m".encode()

    def claim(self, digest: str) -> bytes:
        """Who makes an entry."""
        return f"{self.prefix}:{{{digest}}}:c".encode()

    def chunks(self, digest: str, frame: "Frame", payload_bytes: int) -> list[bytes]:
        """The chunks of a payload, in order; none where it is in the manifest."""
        count = -(-payload_bytes // frame.chunk_bytes) if frame.chunk_bytes else 0
        stem = f"{self.prefix}:{{{digest}}}:{frame.write_id.hex()}"
        return [f"{stem}:{number}".encode() for number in range(count)]


@dataclass(frozen=True, slots=True)
class Frame:
    """How a payload is kept.

    Attributes:
        chunk_bytes: size of every chunk but the last; 0 where the payload follows the header.
        write_id: 16 random bytes that no other write has.
    """

    chunk_bytes: int
    write_id: bytes

    @classmethod
    def new(cls, payload_bytes: int, chunk_bytes: int) -> Self:
        """The frame of a new write."""
        small = payload_bytes <= min(chunk_bytes, INLINE_BYTES)
        return cls(0 if small else chunk_bytes, secrets.token_bytes(16))

    @classmethod
    def read(cls, value: memoryview) -> Self:
        """The frame at the beginning of a manifest.

        Raises:
            CorruptEntry: there is none.
        """
        if len(value) < FRAME_BYTES:
            raise CorruptEntry("its manifest is shorter than its frame")
        _, chunk_bytes, write_id, _ = _FRAME.unpack_from(value)
        frame = cls(chunk_bytes, write_id)
        if value[:FRAME_BYTES] != frame.encode():
            raise CorruptEntry("its manifest does not begin with a frame")
        return frame

    def encode(self) -> bytes:
        """The bytes before the entry's header."""
        check = xxhash.xxh3_64_intdigest(_FRAME.pack(_MAGIC, self.chunk_bytes, self.write_id, 0))
        return _FRAME.pack(_MAGIC, self.chunk_bytes, self.write_id, check)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the beginning of a manifest says, verified."""

    frame: Frame
    info: EntryInfo

    @classmethod
    def read(cls, value: memoryview, digest: str) -> Self:
        """Read the manifest of the entry of this digest; `value` may lack an inlined payload.

        Raises:
            CorruptEntry: it is not the manifest of this entry.
        """
        frame, info = Frame.read(value), read_header(value[FRAME_BYTES:])
        if info.key.digest != digest:
            raise CorruptEntry("it is another key's entry")
        return cls(frame, info)


def manifest_digest(name: bytes) -> str | None:
    """The digest in the name of a manifest, None where this is no such name."""
    match = _MANIFEST_NAME.fullmatch(name)
    return match[1].decode() if match else None


def chunk_owner(name: bytes) -> tuple[str, bytes] | None:
    """Digest and write id in the name of a chunk, None where this is no such name."""
    match = _CHUNK_NAME.fullmatch(name)
    return (match[1].decode(), bytes.fromhex(match[2].decode())) if match else None
