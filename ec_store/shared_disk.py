"""A store in a directory that its users share: tmpfs, a local disk or NFS. There is no server."""

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Self, TypeVar

from ec_store.base import Listed, Store, StoreStats
from ec_store.counts import Counts
from ec_store.disk_config import DiskConfig
from ec_store.entry import MAX_HEADER_BYTES, Entry, EntryInfo
from ec_store.entry_files import EntryFiles, blob_bytes, load_header
from ec_store.errors import CorruptEntry, EntryTooLarge, StoreUnavailable
from ec_store.files import NO_ROOM, Folder, Modes, regular
from ec_store.housekeeping import Housekeeping
from ec_store.keys import EntryKey, owner_bytes
from ec_store.listing import listed, registered
from ec_store.tree import Tree, staging_name

T = TypeVar("T")

TOUCH_EVERY_S = 1.0
"""An entry that was used so lately is not marked as used again."""

LOOK_EVERY_S = 1.0
"""How often a store looks whether its path still leads to the directory it has open."""

MODES_S = 0.05
"""How long another user who has just made a folder may need to give it its permissions, which
making one does not do where the umask is narrower."""

SHARING = "; users who share a store need its group, and dir_mode=2770 and file_mode=0660 each"


class SharedDiskStore(Store):
    """See `Store`. Entries are files, found and renamed by their keys' digests alone."""

    def __init__(self, config: DiskConfig) -> None:
        """Open a directory.

        Raises:
            StoreUnavailable: it cannot be made, written to or read from.
        """
        self._config = config
        self._modes = Modes(config.dir_mode, config.file_mode)
        self._keeper = Housekeeping(config.max_bytes, config.ttl)
        self._touch_s = min(TOUCH_EVERY_S, config.ttl / 4)
        self._files = EntryFiles()
        self.counts = Counts()
        self._opened: Tree | None = None
        self._looked_s = 0.0
        self._closed = False
        try:
            tree = self._tree(create=True)
            self._probe(tree)
            if not tree.usage.names():
                self._keeper.evict(tree)
        except OSError as error:
            message = f"{config.path} cannot be used: {error.strerror or error}"
            if isinstance(error, PermissionError):
                message += SHARING
            raise StoreUnavailable(message) from error

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open `file:///path?max_bytes=64GiB&ttl=7d&…`, each parameter as in `DiskConfig`.

        Raises:
            ValueError: the URL has an unknown or wrong parameter, or no path.
            StoreUnavailable: the directory cannot be used.
        """
        return cls(DiskConfig.from_url(url))

    def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        """See `Store`."""
        size = blob_bytes(key, entry)
        limit = min(self._config.max_entry_bytes, self._config.max_bytes)
        if size > limit:
            raise EntryTooLarge(f"{size} bytes, and the store takes {limit}")
        try:
            with self._unavailable("the entry could not be written"):
                written = self._put(key, entry, size, replace=replace)
        except StoreUnavailable:
            self.counts.add(drops=1)
            raise
        if written:
            self.counts.add(puts=1)
        return written

    def get(self, key: EntryKey) -> Entry | None:
        """See `Store`."""
        entry = self._read(key, key.digest, self._files.load, use=True)
        self.counts.add(misses=entry is None, hits=entry is not None)
        return entry

    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        """See `Store`."""
        return [self._read(key, key.digest, load_header, use=False) for key in keys]

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        """See `Store`. Where a lease cannot be written there is no promise, so nothing is there."""
        digests = [key.digest for key in keys]
        found = [
            self._read(key, digest, load_header, use=True)
            for key, digest in zip(keys, digests, strict=True)
        ]
        there = [digest for digest, info in zip(digests, found, strict=True) if info]
        if not there:
            return found
        try:
            tree = self._tree()
            self._keeper.leases.add(tree.leases, there, seconds, self._now(tree))
        except OSError as error:
            self._lost(error)
            return [None] * len(keys)
        # Looked at again, for an evictor may have taken it before it saw the lease.
        return [
            info if info and tree.there(digest) else None
            for digest, info in zip(digests, found, strict=True)
        ]

    def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        """See `Store`. Exactly one of several owners gets a claim, on NFS too."""
        name = owner_bytes(owner)
        with self._unavailable("claims could not be written"):
            tree = self._tree(create=True)
            return [
                self._keeper.claims.take(
                    tree.claims, key.digest, name, seconds, lambda: self._now(tree)
                )
                for key in keys
            ]

    def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        """See `Store`."""
        name = owner_bytes(owner)
        with self._unavailable("claims could not be given back"):
            tree = self._tree()
            for key in keys:
                self._keeper.claims.give_back(
                    tree.claims, key.digest, name, lambda: self._now(tree)
                )

    def delete(self, keys: Sequence[EntryKey]) -> int:
        """See `Store`."""
        with self._unavailable("entries could not be deleted"):
            tree = self._tree()
            return sum(self._delete(tree, key.digest) for key in keys)

    def purge(self, namespace: str) -> int:
        """See `Store`."""
        purged = 0
        with self._unavailable("the namespace could not be purged"):
            tree = self._tree()
            for row in listed(tree):
                if row.info and row.info.key.namespace == namespace:
                    purged += self._delete(tree, row.digest)
            for name, _, its_namespace in registered(tree.namespaces):
                if its_namespace == namespace:
                    tree.namespaces.remove(name)
        return purged

    def ls(self) -> Iterator[Listed]:
        """See `Store`."""
        with self._unavailable("the store cannot be listed"):
            yield from listed(self._tree())

    def verify(self, *, fix: bool = False) -> Iterator[Listed]:
        """See `Store`."""
        with self._unavailable("the store cannot be verified"):
            for row in listed(self._tree(), self._files):
                if row.problem and fix:
                    self._delete(self._tree(), row.digest)
                yield row

    def evict(self) -> int:
        """See `Store`. Where another process is at it, it is left to that."""
        with self._unavailable("the store cannot be evicted from"):
            return self._keeper.evict(self._tree()) or 0

    def stats(self) -> StoreStats:
        """See `Store`."""
        with self._unavailable("the store cannot be read"):
            tree = self._tree()
            usage = self._keeper.ledger.total(tree.usage)
        return StoreStats(
            entries=max(0, usage.entries),
            bytes=max(0, usage.bytes),
            max_bytes=self._config.max_bytes,
            hits=self.counts["hits"],
            misses=self.counts["misses"],
            puts=self.counts["puts"],
            drops=self.counts["drops"],
            corrupt=self.counts["corrupt"],
            evictions=self._keeper.evictions,
        )

    def register_namespace(self, model: str, namespace: str) -> None:
        """See `Store`."""
        name = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest() + ".json"
        # Not orjson: it refuses the lone surrogates that a name may have.
        content = json.dumps({"model": model, "namespace": namespace}).encode()
        with self._unavailable("the namespace could not be registered"):
            self._tree(create=True).namespaces.replace(name, content)

    def namespaces(self) -> Mapping[str, str]:
        """See `Store`."""
        with self._unavailable("the namespaces cannot be read"):
            return {model: name for _, model, name in registered(self._tree().namespaces)}

    def close(self) -> None:
        """See `Store`."""
        self._closed = True
        self._opened = None
        self._files.close()

    def _tree(self, *, create: bool = False) -> Tree:
        """The open directory; another one where its path leads to another by now."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        tree, now = self._opened, time.monotonic()
        if tree is None or (now - self._looked_s > LOOK_EVERY_S and not tree.current()):
            tree = self._opened = Tree(self._config.path, self._modes, create=create)
        if now - self._looked_s > LOOK_EVERY_S:
            self._looked_s = now
        return tree

    @contextmanager
    def _unavailable(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._lost(error)
            raise StoreUnavailable(f"{what}: {error.strerror or error}") from error

    def _now(self, tree: Tree) -> float:
        return self._keeper.clock.now(tree.root)

    def _lost(self, error: OSError) -> None:
        """After an error that says more than that an entry is missing, begin with a new tree."""
        if error.errno in {errno.ESTALE, errno.EBADF}:
            self._opened = None

    def _probe(self, tree: Tree) -> None:
        """See whether a file can be written and read back. A full disk can still be read."""
        name, content = staging_name("probe", 0), os.urandom(16)
        try:
            tree.root.replace(name, content)
            if tree.root.read(name, 64) != content:
                raise StoreUnavailable("what was written is not what is read")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        finally:
            tree.root.remove(name)

    def _put(self, key: EntryKey, entry: Entry, size: int, *, replace: bool) -> bool:
        digest = key.digest
        if not replace:
            if self._read(key, digest, load_header, use=True):
                return False
            self._forget_expired(digest)
        try:
            return self._write(self._tree(create=True), key, entry, size, replace=replace)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._keeper.evict(self._tree(), free_bytes=size + self._config.max_bytes // 16)
            elif error.errno in {errno.ENOENT, errno.ESTALE}:
                self._opened = None  # the directory was removed under this store
            elif error.errno == errno.EACCES:
                time.sleep(MODES_S)
            else:
                raise
        return self._write(self._tree(create=True), key, entry, size, replace=replace)

    def _forget_expired(self, digest: str) -> None:
        """Make way for an entry whose name one has that nobody gets any more."""
        with suppress(OSError):
            tree = self._tree()
            if not self._live(tree, tree.folder(digest).stat(digest)):
                self._delete(tree, digest)

    def _write(self, tree: Tree, key: EntryKey, entry: Entry, size: int, *, replace: bool) -> bool:
        digest = key.digest
        folder = tree.ensured(digest)
        staging = staging_name(digest, size)
        fd = folder.create(staging)
        published = False
        try:
            # Charged once the staging file says so too, and before a byte of it is written: a
            # count sees either, and nobody is over the quota while they look.
            self._keeper.ledger.charge(tree.usage, size)
            try:
                self._keeper.make_room(tree)
                self._files.store(key, entry, fd)
                if self._config.durability == "fsync":
                    os.fsync(fd)
                if replace:
                    self._replace(tree, folder, staging, digest)
                published = replace or folder.publish(staging, digest)
                if published and self._config.durability == "fsync":
                    folder.sync()
            finally:
                if not published:
                    with suppress(OSError):
                        self._keeper.ledger.release(tree.usage, size)
        finally:
            os.close(fd)
            folder.remove(staging)
        return published

    def _replace(self, tree: Tree, folder: Folder, staging: str, digest: str) -> None:
        before = 0
        with suppress(OSError):
            before = folder.stat(digest).st_size
        folder.rename(staging, digest)
        if before:
            self._keeper.ledger.release(tree.usage, before)

    def _read(
        self, key: EntryKey, digest: str, load: Callable[[EntryKey, int, int], T], *, use: bool
    ) -> T | None:
        """What `load` makes of a live entry's file; None where there is none, or it is corrupt."""
        try:
            tree = self._tree()
            fd = tree.open(digest)
        except OSError as error:
            self._lost(error)
            if error.errno == errno.ELOOP:  # a link where an entry should be
                self._quarantine(tree, digest)
            return None
        try:
            status = os.fstat(fd)
            if not regular(status):
                self._quarantine(tree, digest, status.st_ino)
                return None
            if not self._live(tree, status):
                return None
            loaded = load(key, fd, status.st_size)
            if use:
                self._touch(tree, fd, status)
        except OSError as error:
            self._lost(error)
            return None
        except CorruptEntry:
            self._quarantine(tree, digest, status.st_ino)
            return None
        finally:
            os.close(fd)
        return loaded

    def _live(self, tree: Tree, status: os.stat_result) -> bool:
        age_s = self._now(tree) - status.st_mtime
        # Larger than what is read here: somebody else's limit is another. It would fill the memory.
        limit = self._config.max_entry_bytes + MAX_HEADER_BYTES
        return age_s <= self._config.ttl and status.st_size <= limit

    def _touch(self, tree: Tree, fd: int, status: os.stat_result) -> None:
        """Mark an entry as used now, by the store's clock."""
        if self._now(tree) - status.st_mtime > self._touch_s:
            with suppress(OSError):  # a reader that may not write
                os.utime(fd)

    def _quarantine(self, tree: Tree, digest: str, inode: int | None = None) -> None:
        gone = False
        with suppress(OSError):
            gone = self._keeper.quarantine(tree, digest, inode)
        if gone:
            self.counts.add(corrupt=1)

    def _delete(self, tree: Tree, digest: str) -> bool:
        try:
            folder = tree.folder(digest)
            size = folder.stat(digest).st_size
            os.unlink(digest, dir_fd=folder.fd)
        except FileNotFoundError:
            return False
        self._keeper.ledger.release(tree.usage, size)
        return True
