"""Reading and writing of entries in files, without mapping them.

A mapping would be faster: it copies nothing. But truncating a mapped file ends every process that
maps it with SIGBUS, and an operator or another user may truncate one. And a write to the file
changes a tensor that was verified already. The cache must never end an engine.
"""

import os
from collections.abc import Iterator

import xxhash

from ec_store.buffers import Buffers
from ec_store.concurrency import DaemonPool
from ec_store.counts import after_fork
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
)
from ec_store.errors import CorruptEntry, EntryTooLarge
from ec_store.keys import EntryKey

LARGE_BYTES = 2**20
"""Size in bytes from which hashing in pieces, a second thread, and reused memory pay off."""

_HEAD_BYTES = 4096
"""Bytes of the first read. Most headers are shorter; a longer one is read a second time."""

_PIECE_BYTES = 2**20
"""Bytes of one piece: small enough to be in a core's cache when it is hashed, and large enough that
two threads rarely contend."""

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


def load_header(key: EntryKey | None, fd: int, size: int) -> EntryInfo:
    """Read the header of a file of `size` bytes, and check that it has the key, if one is given.

    Raises:
        CorruptEntry: the header is invalid, or of another key or size.
        OSError: the file cannot be read.
    """
    head = memoryview(os.pread(fd, _HEAD_BYTES, 0))
    length = header_length(head)
    if length > len(head):
        head = memoryview(os.pread(fd, length, 0))
    info = read_header(head)
    if key is not None and info.key != key:
        raise CorruptEntry("it is another key's entry")
    if info.size_bytes != size:
        raise CorruptEntry(f"it is {size} bytes long, not {info.size_bytes}")
    return info


class EntryFiles:
    """Reader and writer of whole entries in files. Thread-safe."""

    def __init__(self) -> None:
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._buffers = Buffers()
        self._helpers = DaemonPool(2, "ec-store")  # its threads do not survive a fork

    def load(self, key: EntryKey, fd: int, size: int) -> Entry:
        """Read the entry in a file of `size` bytes.

        Raises:
            CorruptEntry: the file is not the whole, unchanged entry of this key.
            OSError: the file cannot be read.
        """
        if size < LARGE_BYTES:
            return decode(key, memoryview(os.pread(fd, size, 0)))
        info = load_header(key, fd, size)
        payload = self._buffers.take_buffer(info.payload_bytes)
        if self._fill(payload, fd, info.header_bytes) != info.checksum:
            raise CorruptEntry("its checksum does not match its payload")
        return Entry(payload.toreadonly(), info.dtype, info.shape, info.modality, info.metadata)

    def _fill(self, payload: memoryview, fd: int, offset: int) -> str:
        """Read a payload into memory, and return its checksum.

        Copying from the kernel takes most of the time, so two threads read alternating pieces. If
        the second thread gets no core, this one waits for one piece at most, not for half of the
        payload.
        """
        starts = iter(range(0, len(payload), _PIECE_BYTES))
        present: set[int] = set()

        def read_pieces() -> Iterator[None]:
            for start in starts:  # each piece is taken by one of the two threads
                _read(payload[start : start + _PIECE_BYTES], fd, offset + start)
                present.add(start)
                yield

        hashed, digest = 0, xxhash.xxh3_64()
        helper = self._helpers.submit(lambda: list(read_pieces()))
        try:
            for _ in read_pieces():
                # Hashing a piece while it is in a core's cache costs half of a second pass over
                # memory.
                while hashed in present:
                    digest.update(payload[hashed : hashed + _PIECE_BYTES])
                    hashed += _PIECE_BYTES
        finally:
            # Always wait for the helper: it uses the file, and memory that other entries may reuse.
            if not helper.cancel():
                helper.exception()
        if not helper.cancelled():
            helper.result()
        digest.update(payload[hashed:])
        return digest.hexdigest()

    def store(self, key: EntryKey, entry: Entry, fd: int) -> None:
        """Write an entry into an empty file. Raises OSError."""
        if entry.data.nbytes < LARGE_BYTES:
            header = encode_header(key, entry, checksum(entry.data))
            write(fd, [memoryview(header), entry.data])
            return
        # The header is written last: it holds the checksum, which a helper computes during the
        # write, or this thread if no helper was free.
        hashed = self._helpers.submit(lambda: checksum(entry.data))
        write(fd, [entry.data], len(encode_header(key, entry, _NO_CHECKSUM)))
        known = checksum(entry.data) if hashed.cancel() else hashed.result()
        write(fd, [memoryview(encode_header(key, entry, known))])

    def close(self) -> None:
        """End the helper threads, and release unused memory."""
        self._helpers.close()
        self._begin()


def _read(into: memoryview, fd: int, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise CorruptEntry("it was cut while it was read")
        done += count
