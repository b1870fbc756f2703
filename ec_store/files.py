"""Files below one folder: every name is looked up in an open folder, and no link is followed."""

import errno
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO that somebody put there would wait for its writer.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
DIGEST = re.compile(r"[0-9a-f]{64}")

SETTLES_IN_S = 0.02
"""How long a process may take between making a folder and setting its permissions."""

CLOCK = "clock"
CLOCK_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Modes:
    """Permissions of what is created, whatever the umask.

    Attributes:
        folder: of folders.
        file: of files.
    """

    folder: int = 0o750
    file: int = 0o640


class Folder:
    """An open folder. It is closed when nobody refers to it any more: threads may share it."""

    __slots__ = ("_listed", "fd", "modes")

    def __init__(self, fd: int, modes: Modes, *, listed: bool = False) -> None:
        self.fd = fd
        self.modes = modes
        self._listed = listed

    def __del__(self) -> None:
        try:  # noqa: SIM105 - folders come and go with every lookup, and suppress() takes longer
            os.close(self.fd)
        except OSError:
            pass

    @classmethod
    def at(cls, path: str, modes: Modes) -> "Folder":
        """The folder of a path, made with its parents where it is missing."""
        try:
            os.makedirs(path, modes.folder)  # noqa: PTH103 - as below, names and descriptors
        except FileExistsError:
            pass
        else:
            os.chmod(path, modes.folder)  # noqa: PTH101
        return cls.there(path, modes)

    @classmethod
    def there(cls, path: str, modes: Modes) -> "Folder":
        """The folder of a path. Links on the way to it are the operator's."""
        return cls(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), modes)

    def check_owner(self, allowed: int) -> None:
        """Check that no other user decides what is in this folder.

        Args:
            allowed: permissions that the operator wants; those of the group or of others to
                write mean that other users may own the folder.

        Raises:
            PermissionError: another user owns it, or may write to it.
        """
        status = os.fstat(self.fd)
        path = os.readlink(f"/proc/self/fd/{self.fd}")  # noqa: PTH115
        if status.st_uid not in {0, os.geteuid()} and not allowed & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EACCES, f"{path} belongs to user {status.st_uid}")
        if status.st_mode & stat.S_IWOTH and not allowed & stat.S_IWOTH:
            raise PermissionError(errno.EACCES, f"every user may write to {path}")

    def folder(self, name: str) -> "Folder":
        """A folder in this one."""
        return Folder(self.open(name, FOLDER), self.modes)

    def open(self, name: str, flags: int, mode: int = 0) -> int:
        """Open a name in this folder.

        A folder that a process of another user makes has the permissions that its umask leaves,
        until that process has set them: this call waits for that.

        Raises:
            OSError: it cannot be opened.
        """
        until_s = None
        while True:
            try:
                return os.open(name, flags, mode, dir_fd=self.fd)
            except PermissionError:
                now_s = time.monotonic()
                until_s = until_s or now_s + SETTLES_IN_S
                if now_s > until_s or not self._is_unsettled():
                    raise
            time.sleep(SETTLES_IN_S / 20)

    def _is_unsettled(self) -> bool:
        """Return whether another user made this folder and has not set its permissions yet."""
        status, wanted = os.fstat(self.fd), self.modes.folder
        return status.st_uid != os.geteuid() and status.st_mode & wanted != wanted

    def to_list(self, name: str) -> "Folder":
        """A folder in this one that one thread will list, which saves two calls of the system."""
        fd = self.open(name, LISTED)
        return Folder(fd, self.modes, listed=True)

    def made(self, name: str) -> bool:
        """Make a folder in this one; False where it is there already."""
        try:
            os.mkdir(name, self.modes.folder, dir_fd=self.fd)
        except FileExistsError:
            return False
        # By its name in this folder, which chmod cannot do without following a link.
        fd = os.open(name, os.O_RDONLY | FOLDER & ~os.O_PATH, dir_fd=self.fd)
        try:
            os.fchmod(fd, self.modes.folder)
        finally:
            os.close(fd)
        return True

    def ensured(self, name: str) -> "Folder":
        """A folder in this one, made where it is missing."""
        try:
            return self.folder(name)
        except FileNotFoundError:
            self.made(name)
            return self.folder(name)

    @contextmanager
    def scan(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        """What is in this folder."""
        if self._listed:
            with os.scandir(self.fd) as listing:
                yield listing
            return
        # A descriptor of its own: a place in the listing belongs to the open folder.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            with os.scandir(fd) as listing:
                yield listing
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        """Names in this folder."""
        with self.scan() as listing:
            return [item.name for item in listing]

    def create(self, name: str) -> int:
        """A new file, open for writing."""
        fd = self.open(name, CREATE, self.modes.file)
        try:
            os.fchmod(fd, self.modes.file)
        except OSError:
            os.close(fd)
            self.remove(name)
            raise
        return fd

    def read(self, name: str, size: int) -> bytes:
        """The first bytes of a file."""
        fd = self.open(name, READ)
        try:
            return os.read(fd, size)
        finally:
            os.close(fd)

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file so that it appears whole."""
        staging = f".{secrets.token_hex(8)}.tmp"
        fd = self.create(staging)
        try:
            try:
                write(fd, [memoryview(content)])
            finally:
                os.close(fd)  # NFS clients flush then, and say what failed
            os.rename(staging, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self.remove(staging)
            raise

    def add(self, name: str, content: bytes) -> bool:
        """Write a small file so that it appears whole; False where the name is taken."""
        staging = f".{secrets.token_hex(8)}.tmp"
        self.replace(staging, content)
        try:
            return self.publish(staging, name)
        finally:
            self.remove(staging)

    def publish(self, staging: str, name: str) -> bool:
        """Give a staging file its name; False where the name is taken."""
        try:
            os.link(staging, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError:
            # An NFS client repeats a call whose answer was lost: the name may be this file's.
            return self.stat(staging).st_nlink > 1
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            os.rename(staging, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        return True

    def rename(self, name: str, new: str, into: "Folder | None" = None) -> None:
        """Rename a file, over what has that name, here or into another folder."""
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=(into or self).fd)

    def link(self, name: str, text: str) -> bool:
        """A symbolic link that says something and leads nowhere; False where the name is taken."""
        try:
            os.symlink(text, name, dir_fd=self.fd)
        except FileExistsError:
            return False
        return True

    def has(self, name: str) -> bool:
        """Whether there is anything of this name. Raises OSError where that cannot be said."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def stat(self, name: str) -> os.stat_result:
        """What a name stands for, links not followed."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def remove(self, name: str) -> bool:
        """Remove a file; False where there is none, or it cannot be removed."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError:
            return False
        return True

    def remove_folder(self, name: str) -> bool:
        """Remove a folder; False where there is none, it is not empty, or it cannot be removed."""
        try:
            os.rmdir(name, dir_fd=self.fd)
        except OSError:
            return False
        return True

    def sync(self) -> None:
        """Make names durable."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write(fd: int, parts: Sequence[memoryview], offset: int = 0) -> None:
    """Write all parts, however little the system takes at once."""
    left = [part.cast("B") for part in parts if part.nbytes]
    while left:
        written = os.pwritev(fd, left, offset)
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left and written:
            left[0] = left[0][written:]


def regular(status: os.stat_result) -> bool:
    """Whether this is a plain file."""
    return stat.S_ISREG(status.st_mode)


class StoreClock:
    """The clock of whatever keeps the files, by which their ages are measured.

    Nodes that share a store over NFS may disagree about the time by hours; they agree on the time
    that their file server gives to a file that was just touched. Where clients set such times
    themselves (CephFS, Lustre, BeeGFS), this is the node's own clock.
    """

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()
        self._measured_s = float("-inf")
        self.renew_locks()

    def renew_locks(self) -> None:
        """Begin with free locks, in a child of `fork`."""
        self._lock = threading.Lock()

    def now(self, folder: Folder) -> float:
        """Seconds since the epoch; measured with the file `clock` in `folder` now and then."""
        asked_s = time.monotonic()
        if asked_s - self._measured_s > CLOCK_EVERY_S and self._lock.acquire(blocking=False):
            try:
                self._measured_s = asked_s
                # A reader that may not write goes by its own clock.
                with suppress(OSError):
                    self._ahead_s = self._measure(folder)
            finally:
                self._lock.release()
        return time.monotonic() + self._ahead_s

    @staticmethod
    def _measure(folder: Folder) -> float:
        """Seconds by which the store's clock is ahead of the monotonic one."""
        before_s = time.monotonic()
        try:
            os.utime(CLOCK, dir_fd=folder.fd, follow_symlinks=False)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.close(folder.create(CLOCK))
        # The file got its time in between: a slow server's answer is not taken for a difference.
        between_s = (before_s + time.monotonic()) / 2
        return folder.stat(CLOCK).st_mtime - between_s
