"""The folders of a shared directory.

entries/ab/cd/<digest>                      an entry
entries/ab/cd/.<digest>.<size>.<random>.tmp one that is written or removed at the moment
leases/<when it ends>/<digest>              a lease
claims/<digest>                             a link that says who makes an entry
claims/<digest>.next                        a claim that is changed at the moment
namespaces/<digest of the model>.json       a model's namespace
quarantine/<digest>.<random>                what was found corrupt
usage/<random>                              what one process wrote and removed
evicting, swept                             the evictor's lock; when the last one was done
"""

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ec_store.files import DIGEST, FOLDER, READ, Folder, Modes, regular

KEPT_FOLDERS = 256
"""Folders that are kept open on the way to entries: more than a lookup of 64 keys needs, and a
quarter of the descriptors that a process usually may have."""

_STAGING = re.compile(r"\.([0-9a-f]{64})\.([0-9a-f]{1,16})\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class Found:
    """A file below `entries`.

    Attributes:
        folder: where it is.
        name: its name there.
        digest: whose it is.
        size_bytes: what it takes; of a staging file, what it will take.
        modified_s: when it was written or used, by the store's clock.
        staging: whether it is not an entry, but one that comes or goes.
    """

    folder: Folder
    name: str
    digest: str
    size_bytes: int
    modified_s: float
    staging: bool


class Tree:
    """The open folders of a store. They stay what they are, even if their path becomes another."""

    def __init__(self, path: str, modes: Modes, *, create: bool) -> None:
        """Open them.

        Raises:
            OSError: a folder is missing or cannot be made.
        """
        self.root = (
            Folder.at(path, modes)
            if create
            else Folder(os.open(path, FOLDER & ~os.O_NOFOLLOW), modes)
        )
        opened = self.root.ensured if create else self.root.folder
        self.entries = opened("entries")
        self.leases = opened("leases")
        self.claims = opened("claims")
        self.namespaces = opened("namespaces")
        self.quarantine = opened("quarantine")
        self.usage = opened("usage")
        status = os.fstat(self.entries.fd)
        self._path = os.path.join(path, "entries")  # noqa: PTH118 - stat'ed every second
        self._identity = status.st_dev, status.st_ino
        self._forget()

    def current(self) -> bool:
        """Whether the path still leads here. Folders on the way to entries are opened anew."""
        self._forget()
        try:
            status = os.stat(self._path)  # noqa: PTH116
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def open(self, digest: str) -> int:
        """An entry's file. Raises OSError."""
        folder = self._kept_open(digest[:4])
        return os.open(digest, READ, dir_fd=folder.fd)

    def folder(self, digest: str) -> Folder:
        """The folder of an entry. Raises OSError."""
        return self.entries.folder(digest[:2]).folder(digest[2:4])

    def ensured(self, digest: str) -> Folder:
        """The folder of an entry, made where it is missing.

        No folder is ever removed again, so that no writer loses one: there are 65,792 at most.
        """
        try:
            return self.folder(digest)
        except FileNotFoundError:
            # It may have been removed while it was kept open, and what is written is found at once.
            self._forget()
            return self.entries.ensured(digest[:2]).ensured(digest[2:4])

    def _kept_open(self, name: str) -> Folder:
        """The folder of entries whose digests begin with `name`, which may be what it was before.

        Threads share it: who has got one can use it, even if it is kept no more.
        """
        kept = self._kept  # another one, once they are forgotten
        folder = kept.get(name)
        if folder is None:
            # Every step by itself: O_NOFOLLOW says nothing of links on the way.
            folder = self._kept_open(name[:-2]).folder(name[-2:])
            # None makes way for another: where all are asked for, that costs more than it saves.
            if len(kept) < KEPT_FOLDERS:
                kept[name] = folder
        return folder

    def _forget(self) -> None:
        self._kept = {"": self.entries}

    def there(self, digest: str) -> bool:
        """Whether there is an entry."""
        try:
            self.folder(digest).stat(digest)
        except OSError:
            return False
        return True

    def scan(self, unread: list[OSError]) -> Iterator[Found]:
        """All files below `entries`, in no order; what goes meanwhile is left out.

        Args:
            unread: where it is said what could not be read; the rest is found all the same.
        """
        for first in _folders(self.entries, unread):
            for second in _folders(first, unread):
                yield from _scan(second, unread)


def staging_name(digest: str, size_bytes: int) -> str:
    """A name for an entry that comes or goes, which says what was charged for it."""
    return f".{digest}.{size_bytes:x}.{secrets.token_hex(8)}.tmp"


def _folders(folder: Folder, unread: list[OSError]) -> Iterator[Folder]:
    with _noted(unread):
        for name in folder.names():
            with _noted(unread):
                yield folder.folder(name)


def _scan(folder: Folder, unread: list[OSError]) -> list[Found]:
    found = []
    with _noted(unread), folder.scan() as listing:
        for item in listing:
            staging = _STAGING.fullmatch(item.name)
            if not staging and not DIGEST.fullmatch(item.name):
                continue
            with _noted(unread):
                status = item.stat(follow_symlinks=False)
                if regular(status):
                    digest = staging[1] if staging else item.name
                    size = int(staging[2], 16) if staging else status.st_size
                    found.append(
                        Found(folder, item.name, digest, size, status.st_mtime, staging is not None)
                    )
    return found


@contextmanager
def _noted(unread: list[OSError]) -> Iterator[None]:
    """Go on after an error, and say so, unless what it is about is gone or never was a folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            unread.append(error)
