"""A folder of small files that several processes share. Writes are atomic."""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_S = 5.0
"""Maximum wait for the lock, in seconds. A holder that takes longer is assumed to hang."""

MAX_BYTES = 1024**2
"""Maximum size of a file. A larger one was written by other software."""


class Folder:
    """The folder. Its calls block on the disk, so an event loop runs them on threads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist.

        Raises:
            OSError: the file cannot be read.
        """
        return read_file(self._path / name)

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a file atomically.

        Raises:
            OSError: the file cannot be written; the old content remains.
        """
        self._path.mkdir(mode=0o750, parents=True, exist_ok=True)
        staging = self._path / f".{name}.{secrets.token_hex(8)}"
        try:
            with os.fdopen(
                os.open(staging, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640), "wb"
            ) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(self._path / name)
        finally:
            staging.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, which also ends with the process of its holder.

        Raises:
            OSError: the lock is not available.
        """
        self._path.mkdir(mode=0o750, parents=True, exist_ok=True)
        descriptor = os.open(self._path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640)
        try:
            _lock(descriptor)
            yield
        finally:
            os.close(descriptor)


def read_file(path: Path) -> bytes | None:
    """Return the content of a small file; None if it does not exist.

    Raises:
        OSError: the file cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(content) > MAX_BYTES:
        raise OSError(f"{path.name} has more than {MAX_BYTES} bytes")
    return content


def _lock(descriptor: int) -> None:
    deadline_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError("another process holds the lock") from None
            time.sleep(0.01)
        else:
            return
