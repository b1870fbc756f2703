"""Locks of bytes of open files, which the kernel releases when their process ends.

A lock belongs to the open file (fcntl(2), open file description locks): threads exclude each other,
no other close releases it, and no process id is needed to find out that a holder has died.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` of Linux with 64 bits: type, whence, start, length, process."""


def lock(fd: int, offset: int = 0, *, shared: bool = False) -> bool:
    """Lock a byte until the file is closed; False if it is locked already. Never waits.

    Args:
        fd: file that is open for writing; for reading, if `shared` is set.
        offset: offset of the byte. It may be beyond the end of the file.
        shared: whether other holders may lock it `shared` too.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        _set(fd, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, offset)
    except OSError as error:
        if error.errno not in {errno.EAGAIN, errno.EACCES}:
            raise
        return False
    return True


@contextmanager
def locked(fd: int, offset: int) -> Iterator[bool]:
    """Lock a byte for the duration of the context, if it is free; yield whether it was.

    It is unlocked, not only closed: a child that was forked meanwhile has the file open too.
    """
    held = lock(fd, offset)
    try:
        yield held
    finally:
        if held:
            with suppress(OSError):  # closing the file unlocks it
                _set(fd, fcntl.F_UNLCK, offset)


def is_locked(fd: int, offset: int = 0) -> bool:
    """Return whether a byte is locked by another opening of the file. Raises OSError."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    held = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted)
    kind: int = _FLOCK.unpack(held)[0]
    return kind != fcntl.F_UNLCK


def _set(fd: int, kind: int, offset: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))
