"""Files below one folder: names are opened relative to an open folder, and links not followed."""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO that another user created would wait for its writer.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
UNNAMED = os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC
FILE_BITS = 0o666
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
DIGEST = re.compile(r"[0-9a-f]{64}")


class Folder:
    """Open folder, shared by threads. Its descriptor is closed with its last reference.

    Attributes:
        mode: permissions of new folders, independent of the umask. Those of new files are the same
            without the right to execute.
    """

    __slots__ = ("fd", "mode")

    def __init__(self, fd: int, mode: int) -> None:
        self.fd = fd
        self.mode = mode

    def __del__(self) -> None:
        try:  # noqa: SIM105 - runs with every lookup, and suppress() is slower
            os.close(self.fd)
        except OSError:
            pass

    @classmethod
    def open_path(cls, path: str, mode: int, *, create: bool = True) -> "Folder":
        """Open the folder of a path; `create` creates it, with its parents, if it is missing.

        Links in the path are the operator's and are followed.
        """
        if create:
            with suppress(FileExistsError):
                os.makedirs(path, mode)  # noqa: PTH103 - like the code below
                os.chmod(path, mode)  # noqa: PTH101
        return cls(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), mode)

    def check_owner(self, allowed: int) -> None:
        """Check that no other user controls the content of this folder.

        If the permissions that the operator has set (`allowed`) let the group or others write,
        another user may own the folder.

        Raises:
            PermissionError: another user owns the folder, or may write to it.
        """
        status = os.fstat(self.fd)
        path = os.readlink(f"/proc/self/fd/{self.fd}")  # noqa: PTH115
        trusted = allowed & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid not in {0, os.geteuid()} and not trusted:
            raise PermissionError(errno.EACCES, f"{path} belongs to user {status.st_uid}")
        if status.st_mode & stat.S_IWOTH and not allowed & stat.S_IWOTH:
            raise PermissionError(errno.EACCES, f"every user may write to {path}")

    def folder(self, name: str) -> "Folder":
        return Folder(self.open(name, FOLDER), self.mode)

    def open(self, name: str, flags: int, mode: int = 0) -> int:
        return os.open(name, flags, mode, dir_fd=self.fd)

    def create_folder(self, name: str) -> bool:
        """Create a folder in this one; False if it exists, also if another user created it again.

        Raises OSError, ENOENT also if it was removed at once.
        """
        try:
            os.mkdir(name, self.mode, dir_fd=self.fd)
        except FileExistsError:
            return False
        try:
            # Opened by name: chmod would follow a link in place of the folder.
            fd = os.open(name, os.O_RDONLY | FOLDER & ~os.O_PATH, dir_fd=self.fd)
            try:
                os.fchmod(fd, self.mode)
            finally:
                os.close(fd)
        except PermissionError:
            # An evictor may have removed the empty folder, and another user created it again.
            if self.stat(name).st_uid == os.geteuid():
                raise
            return False
        return True

    def open_or_create(self, name: str) -> "Folder":
        try:
            return self.folder(name)
        except FileNotFoundError:
            self.create_folder(name)
            return self.folder(name)

    @contextmanager
    def scan(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Open a listing of this folder."""
        # A separate descriptor: the position of a listing belongs to the open folder.
        fd = os.open(".", LISTED, dir_fd=self.fd)
        try:
            with os.scandir(fd) as listing:
                yield listing
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        with self.scan() as listing:
            return [item.name for item in listing]

    def create(self, name: str) -> None:
        """Create an empty file. Raises OSError."""
        fd = self.open(name, CREATE, self.mode & FILE_BITS)
        try:
            os.fchmod(fd, self.mode & FILE_BITS)
        finally:
            os.close(fd)

    def create_unnamed(self) -> int:
        """Create a file without a name, which ends with its process; return its descriptor.

        Raises OSError, ENOENT if the folder was removed while it was open.
        """
        try:
            fd = self.open(".", UNNAMED, self.mode & FILE_BITS)
        except PermissionError as error:
            if os.fstat(self.fd).st_nlink:
                raise
            # Where tmpfs says ENOENT, ext4 says EPERM.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
        try:
            os.fchmod(fd, self.mode & FILE_BITS)
        except OSError:
            os.close(fd)
            raise
        return fd

    def publish(self, fd: int, name: str) -> bool:
        """Give an unnamed file its name; False if the name exists."""
        try:
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=self.fd)
        except FileExistsError:
            return False
        return True

    def publish_over(self, fd: int, name: str) -> None:
        """Give an unnamed file its name, also if the name exists."""
        staging = f".{secrets.token_hex(8)}.tmp"
        self.publish(fd, staging)
        try:
            os.rename(staging, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self.remove(staging)
            raise

    def read(self, name: str, size: int) -> bytes:
        fd = self.open(name, READ)
        try:
            return os.read(fd, size)
        finally:
            os.close(fd)

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""
        with self._written(content) as fd:
            self.publish_over(fd, name)

    def add(self, name: str, content: bytes) -> bool:
        """Write a small file atomically; False if the name exists."""
        with self._written(content) as fd:
            return self.publish(fd, name)

    @contextmanager
    def _written(self, content: bytes) -> Iterator[int]:
        fd = self.create_unnamed()
        try:
            write(fd, [memoryview(content)])
            yield fd
        finally:
            os.close(fd)

    def has(self, name: str) -> bool:
        """Return whether the name exists. Raises OSError if that cannot be determined."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def remove(self, name: str) -> bool:
        """Remove a file; False if it is missing or cannot be removed."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self.fd)
            return True
        return False

    def remove_folder(self, name: str) -> bool:
        """Remove a folder; False if it is missing, not empty, or cannot be removed."""
        with suppress(OSError):
            os.rmdir(name, dir_fd=self.fd)
            return True
        return False


def write(fd: int, parts: Sequence[memoryview]) -> None:
    """Write all parts, also if the system accepts only a piece at a time."""
    offset = 0
    left = [part.cast("B") for part in parts if part.nbytes]
    while left:
        written = os.pwritev(fd, left, offset)
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left and written:
            left[0] = left[0][written:]


def close_quietly(fd: int) -> None:
    """Close a file. A failure has no effect: each reader checks what it reads."""
    try:  # noqa: SIM105 - runs with every lookup, and suppress() is slower
        os.close(fd)
    except OSError:
        pass
