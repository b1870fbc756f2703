"""The folders of a shared directory.

config.json                                 what holds for every process that opens the store
entries/ab/cd/<digest>                      an entry
entries/ab/cd/.<digest>.<size>.<random>.tmp one that is written or removed at the moment
leases/<when it ends>/<digest>              a lease
claims/<digest>                             a link that says who makes an entry
claims/<digest>.next                        a claim that is changed at the moment
namespaces/<digest of the model>.json       a model's namespace
quarantine/<digest>.<random>                what was found corrupt
usage/<random>.<sums>.<checksum>            what one process wrote and removed
clock                                       touched to learn the file server's time
evicting, sweeping                          locks of the one that evicts, and that reads all folders
tidied, swept                               when leftovers were last removed; all folders read
"""

import errno
import os
import random
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ec_store.eviction import FileSystem
from ec_store.files import DIGEST, READ, Folder, Modes, regular

KEPT_FOLDERS = 256
"""Folders that are kept open on the way to entries: more than a lookup of 64 keys needs, and a
quarter of the descriptors that a process usually may have."""

RACES = 3
"""How often a folder is made again that another process removed before there was a file in it."""

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
        changed_s: when it was last written or renamed.
        links: how many names it has: a staging file with two is published.
        staging: whether it is not an entry, but one that comes or goes.
    """

    folder: Folder
    name: str
    digest: str
    size_bytes: int
    modified_s: float
    changed_s: float
    links: int
    staging: bool


class Tree:
    """The open folders of a store. They stay what they are, even if their path becomes another.

    Attributes:
        folders: all of them but those of entries.
    """

    def __init__(self, path: str, modes: Modes, *, create: bool) -> None:
        """Open them.

        Raises:
            OSError: a folder is missing or cannot be made.
        """
        self.root = Folder.at(path, modes) if create else Folder.there(path, modes)
        opened = self.root.ensured if create else self.root.folder
        self.entries = opened("entries")
        self.leases = opened("leases")
        self.claims = opened("claims")
        self.namespaces = opened("namespaces")
        self.quarantine = opened("quarantine")
        self.usage = opened("usage")
        self.folders = (
            self.root,
            self.entries,
            self.leases,
            self.claims,
            self.namespaces,
            self.quarantine,
            self.usage,
        )
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
        try:
            return folder.open(digest, READ)
        except OSError as error:
            if not _is_removed(folder, error):
                raise
        # The folder was empty and removed, and may have been made again since.
        self._kept.pop(digest[:4], None)
        return self._kept_open(digest[:4]).open(digest, READ)

    def folder(self, digest: str) -> Folder:
        """The folder of an entry. Raises OSError."""
        return self.entries.folder(digest[:2]).folder(digest[2:4])

    def create(self, digest: str, name: str) -> tuple[Folder, int]:
        """A new file in the folder of an entry, open for writing. The folder is made if needed.

        Raises:
            OSError: it cannot be made; ENOENT also where other processes keep removing its folder.
        """
        for _ in range(RACES):
            with suppress(FileNotFoundError):
                folder = self._ensured(digest)
                return folder, folder.create(name)
        folder = self._ensured(digest)
        return folder, folder.create(name)

    def _ensured(self, digest: str) -> Folder:
        try:
            return self.folder(digest)
        except FileNotFoundError:
            # It may have been removed while it was kept open, and what is written is found at once.
            self._kept.pop(digest[:4], None)
            self._kept.pop(digest[:2], None)
            return self.entries.ensured(digest[:2]).ensured(digest[2:4])

    def remove_empty(self, digest: str) -> None:
        """Remove the folder of an entry if nothing is in it.

        Eviction looks at entries folder by folder: empty ones would cost as much as full ones, and
        a store that lives long would have each of the 65,536. A process that has just made the
        folder makes it again.
        """
        with suppress(OSError):
            self.entries.folder(digest[:2]).remove_folder(digest[2:4])

    def sync(self, digest: str) -> None:
        """Make the names of an entry and of its folders durable, whichever process made them."""
        first = self.entries.folder(digest[:2])
        for folder in (first.folder(digest[2:4]), first, self.entries):
            folder.sync()

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

    def scan(self, unread: list[OSError], *, remove_empty: bool = False) -> Iterator[Found]:
        """All files below `entries`, folder by folder; what goes meanwhile is left out.

        The order of the folders is another each time, and digests say nothing of their entries: the
        first files are a random sample.

        Args:
            unread: where it is said what could not be read; the rest is found all the same.
            remove_empty: whether to remove folders without a file.
        """
        for _, first in _folders(self.entries, unread):
            for name, second in _folders(first, unread):
                found = _scan(second, unread)
                if not found and remove_empty:
                    first.remove_folder(name)
                yield from found

    def file_system(self) -> FileSystem:
        """How large the file system is, and what it has left. Raises OSError."""
        status = os.fstatvfs(self.root.fd)
        return FileSystem(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def staging_name(digest: str, size_bytes: int) -> str:
    """A name for an entry that comes or goes, which says what was charged for it."""
    return f".{digest}.{size_bytes:x}.{secrets.token_hex(8)}.tmp"


def _folders(folder: Folder, unread: list[OSError]) -> Iterator[tuple[str, Folder]]:
    with _noted(unread):
        names = folder.names()
        random.shuffle(names)
        for name in names:
            with _noted(unread):
                yield name, folder.to_list(name)


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
                        Found(
                            folder,
                            item.name,
                            digest,
                            size,
                            status.st_mtime,
                            status.st_ctime,
                            status.st_nlink,
                            staging is not None,
                        )
                    )
    return found


def _is_removed(folder: Folder, error: OSError) -> bool:
    """Tell whether an error came of a folder that was removed, by this host or another one."""
    if error.errno == errno.ENOENT:
        return not os.fstat(folder.fd).st_nlink
    return error.errno == errno.ESTALE


@contextmanager
def _noted(unread: list[OSError]) -> Iterator[None]:
    """Go on after an error, and say so, unless what it is about is gone or never was a folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            unread.append(error)
