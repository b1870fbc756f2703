"""Store in a shared directory, on tmpfs or a disk, without a server."""

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Self, TypeVar

from ec_store.base import Listed, Store, StoreStats, process_counts
from ec_store.counts import Counts
from ec_store.disk import ledger
from ec_store.disk.claims import give_back, take_claims
from ec_store.disk.config import DiskConfig, StoreSettings
from ec_store.disk.entry_files import EntryFiles, blob_bytes, load_header, write_entry
from ec_store.disk.eviction_policy import taken_bytes
from ec_store.disk.files import NO_ROOM, Folder, close_quietly
from ec_store.disk.housekeeping import Housekeeping
from ec_store.disk.leases import add_lease, count_leased, lease_folder, leased_digests
from ec_store.disk.ledger import Usage
from ec_store.disk.listing import list_entries, valid_registrations
from ec_store.disk.lock import try_lock, unlock
from ec_store.disk.opening import LOOK_EVERY_S, DiskOpening
from ec_store.disk.tree import Tree
from ec_store.entry import MAX_HEADER_BYTES, Entry, EntryInfo
from ec_store.errors import (
    CorruptEntry,
    EntryTooLarge,
    OtherFormat,
    StoreMissing,
    StoreUnavailable,
)
from ec_store.keys import EntryKey, encode_name, owner_bytes

T = TypeVar("T")

TOUCH_EVERY_S = 1.0
"""Seconds after a use during which further uses of the entry are not recorded."""

ROOM_MADE = 3
"""Upper bound of the times that a put makes room on a full file system, each time twice as much.
Beside its bytes, an entry takes up to three files: two of them are folders."""

SHARING = "; to share a store, users need its group, and dir_mode=2770 in each URL"

NO_UNNAMED = (
    ": its file system has no files without a name (O_TMPFILE); use tmpfs, ext4, XFS or Btrfs"
)


class SharedDiskStore(Store):
    """Store of entries as files, each named by the digest of its key."""

    def __init__(
        self, config: DiskConfig, *, create: bool = True, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        """Create the store, which opens its directory at its first use.

        `create` and `look_every_s` are as in `DiskOpening`.
        """
        self._config = config
        self._create = create
        self.counts = Counts()
        self._keeper = Housekeeping(self.counts, restores=create)
        self._opening = DiskOpening(config, self._keeper, create=create, look_every_s=look_every_s)
        self._files = EntryFiles()

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> Self:
        """Open `file:///path?max_bytes=64GiB&ttl=7d&…`; errors are those of `open_store`."""
        store = cls(DiskConfig.from_url(url), create=create)
        store.check()
        return store

    def check(self) -> None:
        """Open the directory (see `Store.check`); a process that may create it tests a write."""
        try:
            self._opening.probe()
        except OSError as error:
            advice = SHARING if isinstance(error, PermissionError) else ""
            if error.errno in {errno.EOPNOTSUPP, errno.EISDIR}:
                advice = NO_UNNAMED
            raise self._problem(f"{self._config.path} cannot be used", error, advice) from error

    @property
    def settings(self) -> StoreSettings:
        return self._keeper.settings

    def configure(self, **changes: Any) -> StoreSettings:
        """Change fields of `StoreSettings`; other processes adopt them within a second.

        Raises:
            StoreUnavailable: the store cannot be used or written.
            ValueError: a value is out of range.
        """
        with self._translate_errors("the store cannot be configured"):
            self._opening.configure(**changes)
        return self.settings

    def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        size = blob_bytes(key, entry)
        limit = min(self._config.max_entry_bytes, self.settings.max_bytes)
        if size > limit:
            raise EntryTooLarge(f"it has {size} bytes; the limit is {limit}")
        try:
            with self._translate_errors("the entry could not be written"):
                written = self._put(key, entry, size, replace=replace)
        except StoreUnavailable:
            self.counts.add(drops=1)
            raise
        self.counts.add(puts=written)
        return written

    def get(self, key: EntryKey) -> Entry | None:
        entry = self._read(key.digest, lambda _, *file: self._files.load(key, *file), use=True)
        self.counts.add(misses=entry is None, hits=entry is not None)
        return entry

    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        return self.find([key.digest for key in keys])

    def find(self, digests: Sequence[str]) -> list[EntryInfo | None]:
        """Look up headers as `lookup`, by the digests of their keys."""
        return [self._read(digest, load_header, use=False) for digest in digests]

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        """Lease entries (see `Store.lease`). An entry is a miss if its lease cannot be written."""

        @cache
        def leases() -> Folder:
            return lease_folder(self._opening.tree().leases, seconds, time.time())

        def load_and_lease(digest: str, fd: int, size: int) -> EntryInfo:
            info = load_header(digest, fd, size)
            # An evictor locks an entry before it looks for leases.
            if not try_lock(fd, shared=True):
                raise FileNotFoundError(errno.ENOENT, "it is being evicted")
            try:
                if not os.fstat(fd).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "it was evicted")
                add_lease(leases(), digest)
            finally:
                unlock(fd)
            return info

        return [self._read(key.digest, load_and_lease, use=True) for key in keys]

    def claim(self, keys: Sequence[EntryKey], owner: str, seconds: float) -> list[bool]:
        """Claim entries (see `Store.claim`). Of several owners at once, one gets a claim."""
        name = owner_bytes(owner)
        with self._translate_errors("claims could not be written"):
            tree = self._opening.tree(create=True)
            digests = [key.digest for key in keys]
            return take_claims(tree.claims, digests, name, seconds)

    def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        name = owner_bytes(owner)
        with self._translate_errors("claims could not be released"):
            give_back(self._opening.tree().claims, [key.digest for key in keys], name)

    def delete(self, keys: Sequence[EntryKey]) -> int:
        return self.remove([key.digest for key in keys])

    def remove(self, digests: Sequence[str]) -> int:
        """Delete entries as `delete`, by the digests of their keys."""
        with self._translate_errors("entries could not be deleted"):
            tree = self._opening.tree()
            return sum(self._delete(tree, digest) for digest in digests)

    def purge(self, namespace: str) -> int:
        purged = 0
        with self._translate_errors("the namespace could not be purged"):
            tree = self._opening.tree()
            try:
                for row in list_entries(tree):
                    if row.info and row.info.key.namespace == namespace:
                        purged += self._delete(tree, row.digest)
            finally:
                for name, _, its_namespace in valid_registrations(tree.namespaces):
                    if its_namespace == namespace:
                        tree.namespaces.remove(name)
        return purged

    def ls(self) -> Iterator[Listed]:
        with self._translate_errors("the store cannot be listed"):
            yield from list_entries(self._opening.tree())

    def verify(self, *, fix: bool = False) -> Iterator[Listed]:
        with self._translate_errors("the store cannot be verified"):
            for row in list_entries(self._opening.tree(), self._files):
                if row.problem and fix:
                    self._delete(self._opening.tree(), row.digest)
                yield row

    def evict(self) -> int:
        """Bring the store under its quota; return the number of removed entries."""
        with self._translate_errors("the store cannot be evicted from"):
            return self._keeper.evict(self._opening.tree())

    def sweep(self, every_s: float = 0.0) -> int:
        """Sweep (see `Store.sweep`), unless another process is sweeping."""
        with self._translate_errors("the store cannot be swept"):
            tree = self._opening.tree()
            return self._keeper.sweep(tree, every_s) + self._keeper.evict(tree)

    def stats(self) -> StoreStats:
        with self._translate_errors("the store cannot be read"):
            tree = self._opening.tree()
            usage = self._keeper.usage(tree)
            quota_bytes = self._keeper.quota_bytes(tree.file_system())
            leased = count_leased(tree.leases, time.time())
        return StoreStats(
            entries=max(0, usage.entries),
            bytes=max(0, usage.bytes),
            max_bytes=quota_bytes,
            leased=leased,
            **process_counts(self.counts),
        )

    def register_namespace(self, model: str, namespace: str) -> None:
        name = hashlib.sha256(encode_name(model)).hexdigest() + ".json"
        # Not orjson, which rejects the lone surrogates that a name may have.
        content = json.dumps({"model": model, "namespace": namespace}).encode()
        with self._translate_errors("the namespace could not be registered"):
            self._opening.tree(create=True).namespaces.replace(name, content)

    def namespaces(self) -> Mapping[str, str]:
        with self._translate_errors("the namespaces cannot be read"):
            # Created if missing: engines read the namespaces of a new store before they register
            # one.
            tree = self._opening.tree(create=True)
            return {model: name for _, model, name in valid_registrations(tree.namespaces)}

    def close(self) -> None:
        self._opening.close()

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._problem(what, error) from error

    def _problem(self, what: str, error: OSError, advice: str = "") -> StoreUnavailable:
        if isinstance(error, FileNotFoundError) and not self._create:
            return StoreMissing(f"there is no store in {self._config.path}")
        return StoreUnavailable(f"{what}: {error.strerror or error}{advice}")

    def _put(self, key: EntryKey, entry: Entry, size: int, *, replace: bool) -> bool:
        if not replace and self._read(key.digest, load_header, use=True) is not None:
            return False
        for attempt in range(ROOM_MADE + 1):
            tree, is_last = self._opening.tree(create=True), attempt == ROOM_MADE
            try:
                return self._write(tree, key, entry, size, replace=replace)
            except OSError as error:
                if error.errno in NO_ROOM:
                    if is_last:
                        self._keeper.record_useless()
                    if is_last or not self._keeper.free_space(tree, taken_bytes(size) << attempt):
                        raise
                elif is_last or error.errno not in {errno.ENOENT, errno.EUCLEAN}:
                    raise
                else:  # the directory was removed while it was open, or its ledger was
                    self._opening.reopen_later()
        raise AssertionError

    def _write(self, tree: Tree, key: EntryKey, entry: Entry, size: int, *, replace: bool) -> bool:
        digest, taken = key.digest, taken_bytes(size)
        self._keeper.make_room(tree, taken)
        fd = tree.entries.create_unnamed()
        try:
            write_entry(key, entry, fd)
            if _publish(tree, fd, digest, taken, replace=replace):
                return True
            if self._read(key.digest, load_header, use=True) is not None:
                return False
            # An entry that readers ignore has the name. Readers of another release may lease it.
            if leased_digests(tree.leases, [digest], time.time()):
                return False
            return _publish(tree, fd, digest, taken, replace=True)
        finally:
            close_quietly(fd)

    def _read(self, digest: str, load: Callable[[str, int, int], T], *, use: bool) -> T | None:
        """Open a live entry and call `load`; None if it is missing, corrupt or unreadable."""
        tree = None
        try:
            tree = self._opening.tree()
            fd = tree.open(digest)
        except OSError as error:
            if tree is not None and error.errno == errno.ELOOP:  # a link in place of an entry
                self._remove_corrupt(tree, digest)
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                self._remove_corrupt(tree, digest, status.st_ino)
                return None
            if not self._is_live(status):
                return None
            loaded = load(digest, fd, status.st_size)
            if use:
                self._touch(fd, status)
        except (OSError, OtherFormat):
            return None
        except CorruptEntry:
            self._remove_corrupt(tree, digest, status.st_ino)
        else:
            return loaded
        finally:
            close_quietly(fd)
        return None

    def _is_live(self, status: os.stat_result) -> bool:
        age_s = time.time() - status.st_mtime
        # A larger entry, written under another process's limit, would exhaust the memory here.
        limit = self._config.max_entry_bytes + MAX_HEADER_BYTES
        return age_s <= self.settings.ttl and status.st_size <= limit

    def _touch(self, fd: int, status: os.stat_result) -> None:
        if time.time() - status.st_mtime > min(TOUCH_EVERY_S, self.settings.ttl / 4):
            with suppress(OSError):  # a reader without write permission
                os.utime(fd)

    def _remove_corrupt(self, tree: Tree, digest: str, inode: int | None = None) -> None:
        """Remove a corrupt entry, unless it was replaced since."""
        with suppress(OSError):
            folder = tree.folder(digest)
            status = folder.stat(digest)
            if inode not in {None, status.st_ino}:
                return
            if stat.S_ISREG(status.st_mode):
                ledger.remove_entry(tree.root, folder, digest, inode)
            elif not (folder.remove(digest) or folder.remove_folder(digest)):
                return
            self.counts.add(corrupt=1)

    def _delete(self, tree: Tree, digest: str) -> bool:
        try:
            ledger.remove_entry(tree.root, tree.folder(digest), digest)
        except FileNotFoundError:
            return False
        return True


def _publish(tree: Tree, fd: int, digest: str, taken: int, *, replace: bool) -> bool:
    """Give a file the name of an entry, and charge it; False if there is an entry."""

    def publish(folder: Folder) -> bool:
        before = 0
        with ledger.changing(tree.root) as change:
            if replace:
                with suppress(FileNotFoundError):
                    before = taken_bytes(folder.stat(digest).st_size)
                folder.publish_over(fd, digest)
            elif not folder.publish(fd, digest):
                return False
            try:
                change(Usage(taken, 1, before, 1 if before else 0))
            except OSError:
                folder.remove(digest)
                raise
        return True

    return tree.in_folder(digest, publish)
