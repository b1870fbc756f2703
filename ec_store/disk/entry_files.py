"""Reading and writing of entries in files, without mapping them.

A mapping would be faster: it copies nothing. But truncating a mapped file ends every process that
maps it with SIGBUS, and an operator or another user may truncate one. And a write to the file
changes a tensor that was verified already. The cache must never end an engine.
"""

import os

import xxhash

from ec_store.buffers import Buffers
from ec_store.disk.files import write
from ec_store.entry import (
    MAX_HEADER_BYTES,
    Entry,
    EntryInfo,
    checksum,
    decode,
    encode_header,
    header_length,
    read_header,
    verified_entry,
)
from ec_store.errors import CorruptEntry, EntryTooLarge
from ec_store.keys import EntryKey

LARGE_BYTES = 2**20
"""Size in bytes from which hashing in pieces and reused memory pay off."""

_HEAD_BYTES = 4096
"""Bytes of the first read. Most headers are shorter; a longer one is read a second time."""

_PIECE_BYTES = 2**20
"""Bytes of one piece: small enough to be in a core's cache when it is hashed."""

_NO_CHECKSUM = "0" * 16


def blob_bytes(key: EntryKey, entry: Entry) -> int:
    """Return the size of an entry's blob in bytes.

    Raises:
        EntryTooLarge: the metadata exceed the largest header.
    """
    header_bytes = len(encode_header(key, entry, _NO_CHECKSUM))
    if header_bytes > MAX_HEADER_BYTES:
        raise EntryTooLarge(f"its metadata make a header of {header_bytes} bytes")
    return header_bytes + entry.data.nbytes


def load_header(digest: str, fd: int, size: int) -> EntryInfo:
    """Read the header of a file of `size` bytes, and check that its key has the digest.

    Raises:
        CorruptEntry: the header is invalid, or of another key or size.
        OSError: the file cannot be read.
    """
    head = memoryview(os.pread(fd, _HEAD_BYTES, 0))
    length = header_length(head)
    if length > len(head):
        head = memoryview(os.pread(fd, length, 0))
    info = read_header(head, digest)
    if info.size_bytes != size:
        raise CorruptEntry(f"it is {size} bytes long, not {info.size_bytes}")
    return info


def write_entry(key: EntryKey, entry: Entry, fd: int) -> None:
    """Write an entry into an empty file. Raises OSError."""
    header = encode_header(key, entry, checksum(entry.data))
    write(fd, [memoryview(header), entry.data])


class EntryFiles:
    """Reader of whole entries in files. Thread-safe."""

    def __init__(self) -> None:
        self._buffers = Buffers()

    def load(self, key: EntryKey, fd: int, size: int) -> Entry:
        """Read the entry in a file of `size` bytes.

        Raises:
            CorruptEntry: the file is not the whole, unchanged entry of this key.
            OSError: the file cannot be read.
        """
        if size < LARGE_BYTES:
            return decode(key, memoryview(os.pread(fd, size, 0)))
        info = load_header(key.digest, fd, size)
        payload = self._buffers.take_buffer(info.payload_bytes)
        digest = xxhash.xxh3_64()
        for start in range(0, len(payload), _PIECE_BYTES):
            piece = payload[start : start + _PIECE_BYTES]
            _read(piece, fd, info.header_bytes + start)
            digest.update(piece)
        return verified_entry(info, payload, digest.hexdigest())


def _read(into: memoryview, fd: int, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise CorruptEntry("it was cut while it was read")
        done += count
