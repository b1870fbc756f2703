"""Entries from files and into files, as fast as that goes without mapping them.

A mapping would be faster still: nothing is copied. But whoever cuts a file under its mapping, an
operator or another user, ends this process with SIGBUS; on NFS so does another client's eviction,
once memory is short and a page has to be read again; and whoever writes into the file changes a
tensor that was verified. An engine must never die of its cache.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import xxhash

from ec_store.buffers import Buffers
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
from ec_store.files import write
from ec_store.keys import EntryKey
from ec_store.threads import DaemonPool

T = TypeVar("T")

LARGE_BYTES = 2**20
"""From here on hashing in pieces, a second thread, and keeping the memory are worth it."""

_HEAD_BYTES = 4096
"""Most headers are shorter; a longer one is read a second time."""

_PIECE_BYTES = 2**20
"""Still in a core's cache when it is hashed, and long enough that two threads seldom meet."""

_NO_CHECKSUM = "0" * 16


def blob_bytes(key: EntryKey, entry: Entry) -> int:
    """What an entry takes.

    Raises:
        EntryTooLarge: its metadata are more than a header holds.
    """
    header_bytes = len(encode_header(key, entry, _NO_CHECKSUM))
    if header_bytes > MAX_HEADER_BYTES:
        raise EntryTooLarge(f"its metadata make a header of {header_bytes} bytes")
    return header_bytes + entry.data.nbytes


def load_header(key: EntryKey | None, fd: int, size: int) -> EntryInfo:
    """The header of a file of `size` bytes, of this key if one is given.

    Raises:
        CorruptEntry: the file is not that.
        OSError: it cannot be read.
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
    """Loads and stores whole entries. Safe to use from many threads."""

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._pid = 0
        self._helpers: DaemonPool | None = None
        self.renew_locks()

    def renew_locks(self) -> None:
        """Begin with free locks, in a child of `fork`."""
        self._lock = threading.Lock()
        self._buffers.renew_locks()

    def load(self, key: EntryKey, fd: int, size: int) -> Entry:
        """The entry in a file of `size` bytes.

        Raises:
            CorruptEntry: it is not the entry of this key, whole and unchanged.
            OSError: it cannot be read.
        """
        if size < LARGE_BYTES:
            return decode(key, memoryview(os.pread(fd, size, 0)))
        info = load_header(key, fd, size)
        payload = self._buffers.take(info.payload_bytes)
        if self._fill(payload, fd, info.header_bytes) != info.checksum:
            raise CorruptEntry("its checksum does not fit its payload")
        return Entry(payload.toreadonly(), info.dtype, info.shape, info.modality, info.metadata)

    def _fill(self, payload: memoryview, fd: int, offset: int) -> str:
        """Read a payload, and its checksum.

        Copying out of the kernel is what takes long, so two threads take piece after piece. A
        second thread that gets no core holds this one up for a piece at most, not for a half.
        """
        starts = iter(range(0, len(payload), _PIECE_BYTES))
        there: set[int] = set()

        def read_next() -> bool:
            start = next(starts, None)
            if start is None:
                return False
            _read(payload[start : start + _PIECE_BYTES], fd, offset + start)
            there.add(start)
            return True

        def read_rest() -> None:
            while read_next():
                pass

        hashed, digest = 0, xxhash.xxh3_64()
        helper = self._beside(read_rest)
        try:
            while read_next():
                # Hashed while it is in a core's cache: that costs half of a second pass.
                while hashed in there:
                    digest.update(payload[hashed : hashed + _PIECE_BYTES])
                    hashed += _PIECE_BYTES
        finally:
            # Never left to itself: it has the file, and memory that others may be given.
            if not helper.cancel():
                helper.exception()
        if not helper.cancelled():
            helper.result()
        digest.update(payload[hashed:])
        return digest.hexdigest()

    def store(self, key: EntryKey, entry: Entry, fd: int) -> None:
        """Write an entry into an empty file. Raises OSError."""
        if entry.data.nbytes < LARGE_BYTES:
            write(fd, [memoryview(encode_header(key, entry)), entry.data])
            return
        # The header goes last, for it holds the checksum, which is made beside the writing.
        hashed = self._beside(checksum, entry.data)
        write(fd, [entry.data], len(encode_header(key, entry, _NO_CHECKSUM)))
        known = checksum(entry.data) if hashed.cancel() else hashed.result()
        write(fd, [memoryview(encode_header(key, entry, known))])

    def close(self) -> None:
        """Let the threads and the memory that is not in use go."""
        with self._lock:
            if self._helpers and self._pid == os.getpid():
                self._helpers.close()
            self._helpers = None
            self._buffers = Buffers()

    def _beside(self, call: Callable[..., T], *args: object) -> Future[T]:
        """Have another thread do something. Who can cancel it later does it without help."""
        with self._lock:
            if self._helpers is None or self._pid != os.getpid():  # a fork has no threads
                self._helpers = DaemonPool(2, "ec-store")
                self._pid = os.getpid()
            return self._helpers.submit(functools.partial(call, *args))


def _read(into: memoryview, fd: int, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise CorruptEntry("it was cut while it was read")
        done += count
