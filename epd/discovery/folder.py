"""A folder of small files that several processes share, each written whole or not at all."""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_S = 5.0
"""Whoever holds the lock for longer has stopped in the middle of it."""

MAX_BYTES = 1024**2
"""What is larger is none of ours."""


class Folder:
    """The folder. Its calls wait for the disk: an event loop has threads make them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> bytes | None:
        """A file's content; None where there is none.

        Raises:
            OSError: it cannot be read.
        """
        return read_file(self._path / name)

    def write(self, name: str, content: bytes) -> None:
        """Have everyone read this from now on.

        Raises:
            OSError: it cannot be written; what was there stays.
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
        """Be the only one that is here; the lock ends with its holder, however that ends.

        Raises:
            OSError: it cannot be had.
        """
        self._path.mkdir(mode=0o750, parents=True, exist_ok=True)
        descriptor = os.open(self._path / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640)
        try:
            _lock(descriptor)
            yield
        finally:
            os.close(descriptor)


def read_file(path: Path) -> bytes | None:
    """A small file's content; None where there is none.

    Raises:
        OSError: it cannot be read.
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
