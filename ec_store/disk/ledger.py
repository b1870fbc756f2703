"""Ledger of a shared directory's usage: no put has to count the files."""

import errno
import os
import random
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass

import xxhash

from ec_store.counts import ForkLock, after_fork
from ec_store.disk.files import READ, Folder, close_quietly
from ec_store.disk.lock import locked

NAME = "ledger"

SLOTS = 16
"""Records of the file. A process that is stopped while it changes one locks only that one."""

SLOT_BYTES = 64

SWEEPING = SLOTS + 1
"""Byte that a process locks while it counts all files. Older releases lock it too, and the byte
before it for another purpose; those before that are the bytes of the records."""

READS = 4
"""Times that records are read until they are whole: a writer may be changing one."""

BUSY_S = 1.0
"""Upper bound in seconds of the wait for a record that no other process is changing."""

PAUSE_S = 0.001

_SUMS = struct.Struct("<4Q")
_Sums = tuple[int, int, int, int]
RECORD_BYTES = _SUMS.size + 8

_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class LedgerLost(OSError):
    """Error of a ledger that is missing or damaged: the usage is unknown until it is counted."""

    def __init__(self, what: str) -> None:
        super().__init__(
            errno.EUCLEAN, f"its ledger is {what}: the next process that writes counts the entries"
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes and entries charged and released since the store was created."""

    charged_bytes: int = 0
    charged: int = 0
    released_bytes: int = 0
    released: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.charged_bytes + other.charged_bytes,
            self.charged + other.charged,
            self.released_bytes + other.released_bytes,
            self.released + other.released,
        )

    @property
    def bytes(self) -> int:
        return self.charged_bytes - self.released_bytes

    @property
    def entries(self) -> int:
        return self.charged - self.released

    @property
    def mean_bytes(self) -> int:
        return self.bytes // max(1, self.entries)


class Ledger:
    """Usage ledger in one file of fixed size.

    The file has `SLOTS` records, each the sums of some changes with a checksum. The usage is the
    sum of all records: one read, for any number of writers. A process adds a change to any record
    that it can lock at once, so no process waits for one that was stopped. A process charges an
    entry before it appears, and releases it after it is gone. A process that dies in between leaves
    the sum too high until the next count of the files corrects it.
    """

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._unwritten = Usage()

    def create(self, root: Folder, usage: Usage) -> bool:
        """Create the file; False if there is one. Raises OSError."""
        records = [_record(usage), *[_record(Usage())] * (SLOTS - 1)]
        content = b"".join(record.ljust(SLOT_BYTES, b"\0") for record in records)
        return root.add(NAME, content)

    def discard_damaged(self, root: Folder) -> None:
        """Remove a damaged file, so that it can be created again. Raises OSError."""
        with (
            suppress(LedgerLost),
            _opened(root) as fd,
            locked(fd, SWEEPING) as held,
        ):
            # Another process may have replaced the file since it was opened.
            current = held and root.stat(NAME).st_ino == os.fstat(fd).st_ino
            if current and _read_all(fd) is None:
                root.remove(NAME)

    @contextmanager
    def sweeping(self, root: Folder) -> Iterator[bool]:
        """Hold the lock of the process that counts all files, if it is free; yield whether it was.

        It ends with its process. Raises OSError.
        """
        with _opened(root) as fd, locked(fd, SWEEPING) as held:
            yield held

    def charge(self, root: Folder, size_bytes: int, entries: int = 1) -> None:
        """Charge an entry before it appears."""
        self.add(root, Usage(charged_bytes=size_bytes, charged=entries))

    def release(self, root: Folder, size_bytes: int, entries: int = 1) -> None:
        """Release an entry after it is gone.

        If that cannot be written, it is written with the next change of this process, and until
        then only this process counts it.
        """
        change = Usage(released_bytes=size_bytes, released=entries)
        try:
            self.add(root, change)
        except LedgerLost:  # the next count does not find the entry
            return
        except OSError:
            with self._lock.mutex:
                self._unwritten += change

    def add(self, root: Folder, change: Usage) -> None:
        """Add charges and releases. If it raises OSError, nothing was added."""
        with self._lock.mutex, _opened(root) as fd:
            _add_to_any(fd, change + self._unwritten)
            self._unwritten = Usage()

    def total(self, root: Folder) -> Usage:
        """Return the sum of all processes' charges and releases.

        Raises:
            LedgerLost: the file is missing or damaged.
            OSError: the file cannot be read.
        """
        with _opened(root, READ) as fd:
            records = _read_all(fd)
        if records is None:
            raise LedgerLost("damaged")
        return Usage(*map(sum, zip(*records, strict=True))) + self._unwritten


@contextmanager
def _opened(root: Folder, flags: int = _WRITE) -> Iterator[int]:
    try:
        fd = root.open(NAME, flags)
    except FileNotFoundError as error:
        raise LedgerLost("missing") from error
    try:
        yield fd
    finally:
        close_quietly(fd)


def _add_to_any(fd: int, change: Usage) -> None:
    deadline_s = time.monotonic() + BUSY_S
    while True:
        first = random.randrange(SLOTS)  # noqa: S311 - no secret
        for slot in (*range(first, SLOTS), *range(first)):
            with locked(fd, slot) as held:
                if held:
                    sums = _parse(os.pread(fd, RECORD_BYTES, slot * SLOT_BYTES))
                    if sums is None:
                        raise LedgerLost("damaged")
                    os.pwrite(fd, _record(Usage(*sums) + change), slot * SLOT_BYTES)
                    return
        if time.monotonic() >= deadline_s:
            raise OSError(errno.EAGAIN, "other processes keep its ledger locked")
        time.sleep(PAUSE_S)


def _read_all(fd: int) -> list[_Sums] | None:
    """Return the sums of all records; None if one of them stays damaged."""
    for read in range(READS):
        if read:
            time.sleep(PAUSE_S)
        content = os.pread(fd, SLOTS * SLOT_BYTES, 0)
        starts = range(0, SLOTS * SLOT_BYTES, SLOT_BYTES)
        records = [_parse(content[start : start + RECORD_BYTES]) for start in starts]
        whole = [sums for sums in records if sums]
        if len(whole) == SLOTS:
            return whole
    return None


def _record(usage: Usage) -> bytes:
    sums = _SUMS.pack(*astuple(usage))
    return sums + xxhash.xxh64_digest(sums)


def _parse(record: bytes) -> _Sums | None:
    sums, checksum = record[: _SUMS.size], record[_SUMS.size :]
    return _SUMS.unpack(sums) if xxhash.xxh64_digest(sums) == checksum else None
