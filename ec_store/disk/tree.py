"""Folders of a shared directory.

config.json                                 settings for every process that opens the store
entries/ab/cd/<digest>                      an entry
entries/ab/cd/.<digest>.<size>.<random>.tmp an entry that is being written or removed; the process
                                            that does it locks the file. Size 0: only its final
                                            name is charged
leases/<end of the lease>/<digest>          a lease
claims/<digest>                             a link; its text is the holder of a claim
claims/<digest>.next                        a claim that is being changed
namespaces/<digest of the model>.json       a model's namespace
ledger                                      bytes and entries written and removed so far; a process
                                            that counts all files locks a byte of it
tidied, swept                               times of the last removal of leftovers, last sweep
"""

import errno
import os
import random
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ec_store.disk.eviction_policy import FileSystem
from ec_store.disk.files import DIGEST, NO_ROOM, READ, Folder, Modes, is_regular

RACES = 3
"""Attempts to create a folder that other processes remove before it contains a file."""

_STAGING = re.compile(r"\.([0-9a-f]{64})\.([0-9a-f]{1,16})\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class Found:
    """File below `entries`.

    Attributes:
        folder: folder of the file.
        name: name in that folder.
        digest: digest of the entry's key.
        size_bytes: size of the file; of a staging file, the size in its name: the size that is
            charged for it, or 0 (`release_name`).
        status: status of the file. `st_mtime` is the time of the last write or use, by the store's
            clock, and `st_ctime` that of the last write or rename.
        staging: whether this is a staging file: an entry that is being written or removed.
    """

    folder: Folder
    name: str
    digest: str
    size_bytes: int
    status: os.stat_result
    staging: bool

    @property
    def is_charged(self) -> bool:
        """Return whether the ledger has the size of the file under this name."""
        return self.size_bytes > 0


class Tree:
    """Open folders of a store. They stay the same even if the path leads elsewhere later."""

    def __init__(self, path: str, modes: Modes, *, create: bool) -> None:
        """Open the folders, and create missing ones if `create` is set. Raises OSError."""
        self.root = Folder.open_path(path, modes, create=create)
        opened = self.root.open_or_create if create else self.root.folder
        inner = [opened(name) for name in ("entries", "leases", "claims", "namespaces")]
        self.entries, self.leases, self.claims, self.namespaces = inner
        self.folders = (self.root, *inner)  # all except those of entries
        status = os.fstat(self.entries.fd)
        self._path = os.path.join(path, "entries")  # noqa: PTH118 - stat'ed every second
        self._identity = status.st_dev, status.st_ino

    def current(self) -> bool:
        """Return whether the path still leads here."""
        try:
            status = os.stat(self._path)  # noqa: PTH116
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def open(self, digest: str) -> int:
        """Open an entry's file. Raises OSError."""
        return self.folder(digest).open(digest, READ)

    def folder(self, digest: str) -> Folder:
        """Open the folder of an entry. Raises OSError."""
        # Step by step: O_NOFOLLOW applies to the last part of a path only.
        return self.entries.folder(digest[:2]).folder(digest[2:4])

    def create(self, digest: str, name: str) -> tuple[Folder, int]:
        """Create a file and, if needed, its entry's folder; return folder and descriptor.

        Raises OSError, ENOENT also if other processes keep removing the folder.
        """
        for _ in range(RACES):
            with suppress(FileNotFoundError):
                folder = self._folder_for(digest)
                return folder, folder.create(name)
        folder = self._folder_for(digest)
        return folder, folder.create(name)

    def _folder_for(self, digest: str) -> Folder:
        try:
            return self.folder(digest)
        except FileNotFoundError:
            return self.entries.open_or_create(digest[:2]).open_or_create(digest[2:4])

    def remove_empty(self, digest: str) -> None:
        """Remove the folder of an entry if it is empty.

        Eviction visits entries folder by folder. Empty folders would cost as much as full ones, and
        an old store would have all 65,536. A process that has just created the folder creates it
        again.
        """
        with suppress(OSError):
            self.entries.folder(digest[:2]).remove_folder(digest[2:4])

    def has_entry(self, digest: str) -> bool:
        try:
            self.folder(digest).stat(digest)
        except OSError:
            return False
        return True

    def scan(self, unread: list[OSError], *, remove_empty: bool = False) -> Iterator[Found]:
        """Yield all files below `entries`, folder by folder; files removed meanwhile are left out.

        The order of the folders is random, and digests are independent of their entries' content:
        the first files are a random sample. `unread` gets the error of each folder or file that
        could not be read; the scan continues. `remove_empty` removes folders without a file.
        """
        for _, first in _folders(self.entries, unread):
            for name, second in _folders(first, unread):
                found = _scan(second, unread)
                if not found and remove_empty:
                    first.remove_folder(name)
                yield from found

    def file_system(self) -> FileSystem:
        """Return the size and the free space of the file system. Raises OSError."""
        status = os.fstatvfs(self.root.fd)
        block_bytes = status.f_frsize
        size_bytes, free_bytes = status.f_blocks * block_bytes, status.f_bavail * block_bytes
        return FileSystem(size_bytes, free_bytes, status.f_files, status.f_favail)


def staging_name(digest: str, size_bytes: int) -> str:
    """Return a name for an entry that is being written or removed, with the charged size."""
    return f".{digest}.{size_bytes:x}.{secrets.token_hex(8)}.tmp"


def release_name(folder: Folder, staging: str, digest: str) -> str:
    """Rename a staging file before it is published, and return its new name, with size 0.

    From then on only the final name is charged: if the process dies before it removes this one, its
    later removal releases nothing. Without room for the name the old one is returned.
    """
    name = staging_name(digest, 0)
    try:
        folder.rename(staging, name)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return staging
    return name


def _folders(folder: Folder, unread: list[OSError]) -> Iterator[tuple[str, Folder]]:
    with _collect_error(unread):
        names = folder.names()
        random.shuffle(names)
        for name in names:
            with _collect_error(unread):
                yield name, folder.folder(name)


def _scan(folder: Folder, unread: list[OSError]) -> list[Found]:
    found: list[Found] = []
    with _collect_error(unread), folder.scan() as listing:
        for item in listing:
            staging = _STAGING.fullmatch(item.name)
            if not staging and not DIGEST.fullmatch(item.name):
                continue
            with _collect_error(unread):
                status = item.stat(follow_symlinks=False)
                if is_regular(status):
                    digest = staging[1] if staging else item.name
                    size = int(staging[2], 16) if staging else status.st_size
                    found.append(
                        Found(folder, item.name, digest, size, status, staging is not None)
                    )
    return found


@contextmanager
def _collect_error(unread: list[OSError]) -> Iterator[None]:
    """Append an error to the list and continue, unless the file is gone or not a folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            unread.append(error)
