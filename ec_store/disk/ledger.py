"""Ledger of a shared directory's usage: no put has to count the files.

One file has the sums of all that was written and removed, with a checksum. A process locks it while
it publishes or removes an entry and adds that to the sums. If it dies in between, the sums are
wrong by that entry until the files are counted.
"""

import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass

import xxhash

from ec_store.disk.eviction_policy import taken_bytes
from ec_store.disk.files import READ, Folder, close_quietly
from ec_store.disk.lock import lock

NAME = "ledger"

_SUMS = struct.Struct("<4Q")
_RECORD_BYTES = _SUMS.size + 8

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


def create(root: Folder, usage: Usage) -> bool:
    """Create the ledger; False if there is one. Raises OSError."""
    return root.add(NAME, _record(usage))


def restore(root: Folder, usage: Usage) -> None:
    """Replace a damaged ledger, unless another process has done so meanwhile. Raises OSError."""
    with suppress(LedgerLost), _opened(root, READ) as fd, lock(fd):
        if root.stat(NAME).st_ino == os.fstat(fd).st_ino and _parse(fd) is None:
            root.replace(NAME, _record(usage))


def total(root: Folder) -> Usage:
    """Return the sums.

    Raises:
        LedgerLost: the ledger is missing or damaged.
        OSError: the ledger cannot be read.
    """
    with _opened(root, READ) as fd:
        usage = _parse(fd)
        if usage is None:  # another process may be changing it
            with lock(fd):
                usage = _parse(fd)
    if usage is None:
        raise LedgerLost("damaged")
    return usage


@contextmanager
def changing(root: Folder) -> Iterator[Callable[[Usage], None]]:
    """Lock the ledger for the duration of the context; yield a function that adds to its sums.

    A change that cannot be written is added with the next one.

    Raises:
        LedgerLost: the ledger is missing or damaged.
        OSError: the ledger cannot be written, or another process keeps it locked.
    """
    with _opened(root, _WRITE) as fd, lock(fd):
        found = _parse(fd)
        if found is None:
            raise LedgerLost("damaged")
        now = found

        def change(added: Usage) -> None:
            nonlocal now
            now += added
            _write(fd, now)

        yield change


def remove_entry(root: Folder, folder: Folder, digest: str, inode: int | None = None) -> None:
    """Remove an entry, and release it, as `remove_locked` does with a locked ledger."""
    with changing(root) as change:
        remove_locked(change, folder, digest, inode)


def remove_locked(
    change: Callable[[Usage], None], folder: Folder, digest: str, inode: int | None = None
) -> int:
    """Remove an entry, release it, and return the bytes that it took.

    `change` is that of `changing`. `inode` is that of its file, unless any may be removed. If the
    release cannot be written, it is left to the next count. Raises OSError, also if there is no
    entry, or if it was replaced.
    """
    status = folder.stat(digest)
    if inode not in {None, status.st_ino}:
        raise FileNotFoundError(errno.ENOENT, "it was replaced")
    size_bytes = taken_bytes(status.st_size)
    os.unlink(digest, dir_fd=folder.fd)
    with suppress(OSError):
        change(Usage(released_bytes=size_bytes, released=1))
    return size_bytes


def correct(root: Folder, before: Usage, size_bytes: int, entries: int) -> None:
    """Correct the sums by a count of all files; `before` are the sums before the count.

    Others may write and remove files meanwhile. What they wrote may be counted or not, so only a
    difference beyond it is corrected. A second correction for the same difference changes nothing.
    One that cannot be written is left to the next count. Errors are those of `changing`.
    """
    if _difference(before, total(root), size_bytes, entries) != Usage():
        with changing(root) as change, suppress(OSError):
            change(_difference(before, total(root), size_bytes, entries))


def _difference(before: Usage, now: Usage, size_bytes: int, entries: int) -> Usage:
    missing_bytes, missing = size_bytes - now.bytes, entries - now.entries
    return Usage(
        charged_bytes=max(0, missing_bytes - (now.released_bytes - before.released_bytes)),
        charged=max(0, missing - (now.released - before.released)),
        released_bytes=max(0, -missing_bytes - (now.charged_bytes - before.charged_bytes)),
        released=max(0, -missing - (now.charged - before.charged)),
    )


@contextmanager
def _opened(root: Folder, flags: int) -> Iterator[int]:
    try:
        fd = root.open(NAME, flags)
    except FileNotFoundError as error:
        raise LedgerLost("missing") from error
    try:
        yield fd
    finally:
        close_quietly(fd)


def _write(fd: int, usage: Usage) -> None:
    os.pwrite(fd, _record(usage), 0)


def _record(usage: Usage) -> bytes:
    sums = _SUMS.pack(*astuple(usage))
    return sums + xxhash.xxh64_digest(sums)


def _parse(fd: int) -> Usage | None:
    record = os.pread(fd, _RECORD_BYTES + 1, 0)
    sums, checksum = record[: _SUMS.size], record[_SUMS.size :]
    if len(sums) < _SUMS.size or xxhash.xxh64_digest(sums) != checksum:
        return None
    return Usage(*_SUMS.unpack(sums))
