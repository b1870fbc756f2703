"""How full a shared directory is, without counting it at every put."""

import os
import secrets
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

from ec_store.files import CREATE, Folder

IDLE_S = 3600.0
"""A writer that wrote nothing for so long is taken for gone, and its line is merged."""

_LINE = struct.Struct("<4q")
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Usage:
    """What was charged and released since the store began, in bytes and entries."""

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
        """What is in use."""
        return self.charged_bytes - self.released_bytes

    @property
    def entries(self) -> int:
        """How many entries there are."""
        return self.charged - self.released


class Ledger:
    """One small file for each process, which only that process writes; the sum is the usage.

    So no lock is taken for a put. A process charges before an entry appears and releases after one
    went, so that one that dies in between leaves the sum too high, never too low, until the next
    eviction counts the files and corrects it.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._name = secrets.token_hex(8)
        self._own = Usage()
        self._lock = threading.Lock()

    def charge(self, folder: Folder, size_bytes: int, entries: int = 1) -> None:
        """Count an entry that will appear."""
        self._add(folder, Usage(charged_bytes=size_bytes, charged=entries))

    def release(self, folder: Folder, size_bytes: int, entries: int = 1) -> None:
        """Count an entry that is gone."""
        self._add(folder, Usage(released_bytes=size_bytes, released=entries))

    def _add(self, folder: Folder, change: Usage) -> None:
        if self._pid != os.getpid():  # forked: that line is the parent's
            self._begin()
        with self._lock:
            self._own += change
            try:
                fd = os.open(self._name, _WRITE, dir_fd=folder.fd)
            except FileNotFoundError:
                # The first change, or the line was merged into another's: it begins again.
                self._own = change
                fd = os.open(self._name, CREATE, folder.modes.file, dir_fd=folder.fd)
                os.fchmod(fd, folder.modes.file)
            try:
                own = self._own
                line = _LINE.pack(own.charged_bytes, own.charged, own.released_bytes, own.released)
                os.pwrite(fd, line, 0)
            finally:
                os.close(fd)  # what is closed is seen by other NFS clients

    def total(self, folder: Folder) -> Usage:
        """What all processes charged and released."""
        total = Usage()
        for name in folder.names():
            total += _line(folder, name)
        return total

    def merge(self, folder: Folder, now_s: float) -> None:
        """Take over the lines of processes that are gone. For the evictor alone."""
        for name in folder.names():
            with suppress(OSError):
                if name != self._name and now_s - folder.stat(name).st_mtime > IDLE_S:
                    line = _line(folder, name)
                    if folder.remove(name):
                        self._add(folder, line)


def _line(folder: Folder, name: str) -> Usage:
    try:
        raw = folder.read(name, _LINE.size)
    except OSError:
        return Usage()
    return Usage(*_LINE.unpack(raw)) if len(raw) == _LINE.size else Usage()
