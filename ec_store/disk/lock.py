"""Lock file that expires with its holder, and works over NFS."""

import errno
import hashlib
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ec_store.disk.files import NO_LINKS, Folder

STALE_S = 30.0
"""Seconds without a renewal after which a holder has lost its lock."""


def _machine() -> str:
    """Return a name of the scope of process ids: the boot and the PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        # os.stat, since Path cannot stat the target of a descriptor's link, which has the number.
        scope = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    except OSError:
        return secrets.token_hex(8)
    # Short: ext4 keeps a link in its inode, and so needs no block for it, up to 59 characters.
    return hashlib.blake2b(scope.encode(), digest_size=8).hexdigest()


class FileLock:
    """Symbolic link that exists while a process does exclusive work, such as eviction.

    Its text names the holder, and no code follows it. Releases that lock with files use other
    names, since they cannot read or remove a link. On tmpfs and common disks, a link takes no
    block, so a full file system can be evicted from. On a file system without symbolic links, the
    lock is a file with the same content.

    The lock saves work; two holders at once do no harm. Each holder checks that the lock is still
    its own before each batch that it removes. So a slow holder that lost its lock ends its work,
    and no entry is counted twice: of two processes that remove it, the second finds it gone.
    """

    def __init__(self, name: str) -> None:
        """Create the lock of this file name. Threads may share it: one at a time acquires it."""
        self._file = name
        self._machine = _machine()

    def acquire(self, folder: Folder, now: Callable[[], float]) -> str | None:
        """Return the holder's token; None, without a write, if it is held. Raises OSError."""
        token = f"{self._machine} {os.getpid()} {secrets.token_hex(8)}"
        for _ in range(2):
            if not self._break(folder, now()):
                return None
            if self._create(folder, token):
                return token
            with suppress(FileNotFoundError):
                # An NFS client repeats a call if the reply is lost: the link may be this one.
                if _text(folder, self._file) == token:
                    return token
        return None

    def still_held(self, folder: Folder, token: str) -> bool:
        """Return whether the lock is still that of the token, and renew it."""
        try:
            if _text(folder, self._file) != token:
                return False
        except OSError:
            return False
        # Without renewals the lock is broken after `STALE_S`, and then has another text.
        with suppress(OSError):
            os.utime(self._file, dir_fd=folder.fd, follow_symlinks=False)
        return True

    def release(self, folder: Folder, token: str) -> None:
        """Release the lock if it is still that of the token."""
        for _ in range(2):  # again after one error: a lock that stays stops others for `STALE_S`
            with suppress(OSError):
                if _text(folder, self._file) == token:
                    os.unlink(self._file, dir_fd=folder.fd)
                return

    def _break(self, folder: Folder, now_s: float) -> bool:
        """Remove the lock of a dead holder; True if the lock is free now."""
        try:
            holder = _text(folder, self._file)
            # A renewal far ahead of the clock is from before the clock was set back.
            age_s = abs(now_s - folder.stat(self._file).st_mtime)
            if age_s <= STALE_S and not self._is_dead(holder):
                return False
            aside = f".{secrets.token_hex(8)}.tmp"
            folder.rename(self._file, aside)
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        # Another process may have taken the lock since the read: its lock is restored.
        moved = holder
        with suppress(OSError):
            moved = _text(folder, aside)
        folder.remove(aside)
        if moved != holder:
            with suppress(OSError):
                self._create(folder, moved)
        return True

    def _create(self, folder: Folder, token: str) -> bool:
        """Create the lock, at once with its holder; False if it exists. Raises OSError."""
        try:
            return folder.link(self._file, token)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return folder.add(self._file, token.encode())

    def _is_dead(self, holder: str) -> bool:
        machine, _, rest = holder.partition(" ")
        pid, _, _ = rest.partition(" ")
        if machine != self._machine or not pid.isdecimal():
            return False
        try:
            os.kill(int(pid), 0)
        except (OSError, OverflowError) as error:  # no process has such a number
            return isinstance(error, ProcessLookupError | OverflowError)
        return False


def _text(folder: Folder, name: str) -> str:
    """Return the text of a lock. Raises OSError."""
    try:
        return os.readlink(name, dir_fd=folder.fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not a symbolic link
            raise
        return folder.read(name, 512).decode(errors="replace")
