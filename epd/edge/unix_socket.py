"""Unix socket to listen on: its file is created, replaced if it is stale, and removed."""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def listening_at(path: Path, backlog: int) -> Iterator[socket.socket]:
    """Return a socket that listens at a path; the end of the context removes its file.

    A stale socket file, on which no process listens, is replaced. The umask sets the mode of the
    new file: a client needs write permission.

    Args:
        path: path of the socket file.
        backlog: connections that the kernel holds until they are accepted.

    Raises:
        OSError: a process listens at the path, the file is not a socket, or it cannot be created.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with _alone_in(path.parent):
            _remove_stale(path)
            listener.bind(str(path))
            own = path.stat()
            # Within the lock: another process would find a file without a listener stale.
            listener.listen(backlog)
        try:
            yield listener
        finally:
            _remove(path, own)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no other process replaces a socket in it meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "the file is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # a process listens, and its backlog is full
            pass
    raise OSError(errno.EADDRINUSE, "another process listens on it")


def _remove(path: Path, own: os.stat_result) -> None:
    """Remove the file, unless another process has replaced it."""
    with suppress(FileNotFoundError):
        now = path.lstat()
        if (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino):
            path.unlink()
