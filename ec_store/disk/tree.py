"""Folders of a shared directory.

config.json                           settings for every process that opens the store
entries/ab/cd/<digest>                an entry; a file without a name until it is whole
leases/<end of the lease>/<digest>    a lease
claims/<digest>                       a link; its text is the holder of a claim
namespaces/<digest of the model>.json a model's namespace
ledger                                bytes and entries written and removed so far
swept                                 time of the last sweep
.<random>.tmp                         a file that is about to replace another one
"""

import errno
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from ec_store.disk.eviction_policy import EvictionCandidate, FileSystem
from ec_store.disk.files import DIGEST, READ, Folder

T = TypeVar("T")

RACES = 3
"""Attempts to create a folder that other processes remove before it contains a file."""

STAGING_S = 60.0
"""Age in seconds from which a file that is about to replace another one counts as left by a
crash."""

AHEAD_S = 60.0
"""Seconds by which a time of use may be ahead of the clock."""


@dataclass(frozen=True, slots=True)
class Found(EvictionCandidate):
    """Entry, with its open folder and the inode of its file."""

    folder: Folder
    inode: int


class Tree:
    """Open folders of a store. They stay the same even if the path leads elsewhere later."""

    def __init__(self, path: str, mode: int, *, create: bool) -> None:
        """Open the folders, and create missing ones if `create` is set. Raises OSError."""
        self.root = Folder.open_path(path, mode, create=create)
        opened = self.root.open_or_create if create else self.root.folder
        inner = [opened(name) for name in ("entries", "leases", "claims", "namespaces")]
        self.entries, self.leases, self.claims, self.namespaces = inner
        self.folders = (self.root, *inner)  # all except those of entries

    def open(self, digest: str) -> int:
        """Open an entry's file. Raises OSError."""
        return self.folder(digest).open(digest, READ)

    def folder(self, digest: str) -> Folder:
        """Open the folder of an entry. Raises OSError."""
        # Step by step: O_NOFOLLOW applies to the last part of a path only.
        return self.entries.folder(digest[:2]).folder(digest[2:4])

    def in_folder(self, digest: str, action: Callable[[Folder], T]) -> T:
        """Call `action` with the folder of an entry, which is created if needed.

        Raises OSError, ENOENT also if other processes keep removing the folder.
        """
        for _ in range(RACES):
            with suppress(FileNotFoundError):
                return action(self._folder_for(digest))
        return action(self._folder_for(digest))

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

    def scan(self, unread: list[OSError], *, clean: bool = False) -> Iterator[Found]:
        """Yield all entries, folder by folder; those removed meanwhile are left out.

        The order of the folders is random, and digests are independent of their entries' content:
        the first entries are a random sample. `unread` gets the error of each folder or file that
        could not be read; the scan continues. `clean` removes empty folders, and files that crashes
        left.
        """
        for _, first in _folders(self.entries, unread):
            for name, second in _folders(first, unread):
                found = _scan(second, unread, clean=clean)
                if not found and clean:
                    first.remove_folder(name)
                yield from found

    def file_system(self) -> FileSystem:
        """Return the size and the free space of the file system. Raises OSError."""
        status = os.fstatvfs(self.root.fd)
        block_bytes = status.f_frsize
        size_bytes, free_bytes = status.f_blocks * block_bytes, status.f_bavail * block_bytes
        return FileSystem(size_bytes, free_bytes, status.f_files, status.f_favail)


def used_s(status: os.stat_result) -> float:
    """Return when an entry was last used; 0 for a time ahead, which would keep it indefinitely."""
    return status.st_mtime if status.st_mtime <= time.time() + AHEAD_S else 0.0


def remove_staging(folder: Folder, name: str) -> None:
    """Remove a file that was about to replace another one when its process died."""
    if name[0] == "." and name.endswith(".tmp"):
        with suppress(OSError):
            if time.time() - folder.stat(name).st_ctime > STAGING_S:
                folder.remove(name)


def _folders(folder: Folder, unread: list[OSError]) -> Iterator[tuple[str, Folder]]:
    with _collect_error(unread):
        names = folder.names()
        random.shuffle(names)
        for name in names:
            with _collect_error(unread):
                yield name, folder.folder(name)


def _scan(folder: Folder, unread: list[OSError], *, clean: bool) -> list[Found]:
    found: list[Found] = []
    with _collect_error(unread), folder.scan() as listing:
        for item in listing:
            if not DIGEST.fullmatch(item.name):
                if clean:
                    remove_staging(folder, item.name)
                continue
            with _collect_error(unread):
                status = item.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    size, inode = status.st_size, status.st_ino
                    found.append(Found(item.name, size, used_s(status), folder, inode))
    return found


@contextmanager
def _collect_error(unread: list[OSError]) -> Iterator[None]:
    """Append an error to the list and continue, unless the file is gone or not a folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            unread.append(error)
