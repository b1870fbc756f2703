"""Locks of open files, which the kernel releases when their process ends.

A lock (flock(2)) belongs to the open file: threads that open the file each exclude each other, and
a process id is not needed to find out that a holder has died.
"""

import errno
import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BUSY_S = 1.0
"""Upper bound in seconds of the wait for a lock. A process keeps one for microseconds, unless it is
stopped meanwhile."""

PAUSE_S = 0.001


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock a file; False if another opening of it is locked. Raises OSError."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Unlock a file. To close it does not suffice if a child that was forked has it open too."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


@contextmanager
def lock(fd: int) -> Iterator[None]:
    """Lock a file for the duration of the context. Raises OSError after `BUSY_S`."""
    deadline_s = time.monotonic() + BUSY_S
    while not try_lock(fd):
        if time.monotonic() >= deadline_s:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115, PTH119
            raise OSError(errno.EAGAIN, f"another process keeps its {name} locked")
        time.sleep(random.uniform(PAUSE_S / 10, PAUSE_S))  # noqa: S311 - no secret
    try:
        yield
    finally:
        unlock(fd)
