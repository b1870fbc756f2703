"""A lock that survives its holder and needs nothing NFS lacks."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ec_store.files import Folder, write

STALE_S = 30.0
"""A holder that gave no sign of life for so long has lost its lock."""


def _machine() -> str:
    """Names the processes among which a process id means something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        # Not Path: it has no stat of a descriptor's link, which is where the number is.
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    except OSError:
        return secrets.token_hex(8)


class FileLock:
    """A file that exists while one process does something, as evicting entries.

    No two processes should, and nothing breaks if they do. Each holder looks whether the lock is
    still its own before each batch it removes. So a holder that was taken for dead and was only
    slow ends its work, and one entry is never counted twice: of two that remove it, one is told
    that it was not there.
    """

    def __init__(self, name: str) -> None:
        """A lock with this file name. Threads may share it: one at a time gets it."""
        self._file = name
        self._machine = _machine()
        self._token = ""

    def acquire(self, folder: Folder, now: Callable[[], float]) -> bool:
        """Take the lock; False where another holds it, which writes nothing. Raises OSError."""
        token = f"{self._machine} {os.getpid()} {secrets.token_hex(8)}"
        for _ in range(2):
            if not self._break(folder, now()):
                return False
            if self._create(folder, token):
                self._token = token
                return True
        return False

    def _create(self, folder: Folder, token: str) -> bool:
        # Linked, not created: it must never be seen without saying whose it is.
        staging = f".{secrets.token_hex(8)}.tmp"
        fd = folder.create(staging)
        try:
            try:
                write(fd, [memoryview(token.encode())])
            finally:
                os.close(fd)  # what is closed is seen by other NFS clients
            return folder.publish(staging, self._file)
        finally:
            folder.remove(staging)

    def held(self, folder: Folder) -> bool:
        """Whether the lock is still this holder's; also the sign of life."""
        try:
            if folder.read(self._file, 512).decode(errors="replace") != self._token:
                return False
            os.utime(self._file, dir_fd=folder.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def release(self, folder: Folder) -> None:
        """Let go."""
        if self.held(folder):
            self._token = ""  # before another thread may take the lock
            folder.remove(self._file)

    def _break(self, folder: Folder, now_s: float) -> bool:
        """Remove the lock of a holder that is gone; whether there is none now."""
        try:
            holder = folder.read(self._file, 512).decode(errors="replace")
            if now_s - folder.stat(self._file).st_mtime <= STALE_S and not self._dead(holder):
                return False
            aside = f".{secrets.token_hex(8)}.tmp"
            folder.rename(self._file, aside)
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        # Somebody else may have broken and taken it since it was read: theirs is given back.
        with suppress(OSError):
            if folder.read(aside, 512).decode(errors="replace") != holder:
                folder.publish(aside, self._file)
        folder.remove(aside)
        return True

    def _dead(self, holder: str) -> bool:
        machine, _, rest = holder.partition(" ")
        pid, _, _ = rest.partition(" ")
        if machine != self._machine or not pid.isdecimal():
            return False
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False
