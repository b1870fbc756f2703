"""Store in a shared directory, on tmpfs or a disk, without a server."""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self, TypeVar

from ec_store.base import Listed, Store, StoreStats
from ec_store.counts import Counts
from ec_store.disk.claims import (
    add_leases,
    count_leased,
    give_back,
    leased_digests,
    take_claims,
)
from ec_store.disk.config import DiskConfig, GivenSettings, StoreSettings
from ec_store.disk.entry_files import (
    EntryFiles,
    blob_bytes,
    list_entries,
    load_header,
    valid_registrations,
)
from ec_store.disk.evictor import YOUNG_S
from ec_store.disk.files import NO_ROOM, READ, Folder, is_regular
from ec_store.disk.housekeeping import Housekeeping
from ec_store.disk.opening import DiskOpening
from ec_store.disk.tree import Tree, staging_name, taken_bytes
from ec_store.entry import MAX_HEADER_BYTES, Entry, EntryInfo
from ec_store.errors import (
    CorruptEntry,
    EntryTooLarge,
    OtherFormat,
    StoreMissing,
    StoreUnavailable,
)
from ec_store.keys import EntryKey, owner_bytes

T = TypeVar("T")

TOUCH_EVERY_S = 1.0
"""Seconds after a use during which further uses of the entry are not recorded."""

ROOM_MADE = 3
"""Upper bound of the times that a put makes room on a full file system, each time twice as much.
Beside its bytes, an entry takes up to five files: folders, a second name, a line of the ledger."""

SHARING = (
    "; to share a store, users need its group, and dir_mode=2770 and file_mode=0660 in each URL"
)


class SharedDiskStore(Store):
    """Store of entries as files, each named by the digest of its key."""

    def __init__(
        self,
        config: DiskConfig,
        *,
        create: bool = True,
        maintain: bool = False,
        young_s: float = YOUNG_S,
    ) -> None:
        """Create the store; its first use opens the directory.

        `create` and `maintain` are as in `DiskOpening`, `young_s` as in `Evictor`.
        """
        self._config = config
        self._create = create
        self.counts = Counts()
        self._keeper = Housekeeping(self.counts, young_s)
        self._opening = DiskOpening(config, self._keeper, create=create, maintain=maintain)
        self._files = EntryFiles()

    @classmethod
    def from_url(cls, url: str, *, create: bool = True, maintain: bool = False) -> Self:
        """Open `file:///path?max_bytes=64GiB&ttl=7d&…`; errors are those of `open_store`."""
        store = cls(DiskConfig.from_url(url), create=create, maintain=maintain)
        store.check()
        return store

    def check(self) -> None:
        """Open the directory (see `Store.check`); a process that may create it tests a write."""
        try:
            self._opening.probe()
        except OSError as error:
            advice = SHARING if isinstance(error, PermissionError) else ""
            raise self._problem(f"{self._config.path} cannot be used", error, advice) from error

    @property
    def settings(self) -> StoreSettings:
        return self._keeper.settings

    @property
    def in_memory(self) -> bool:
        return self._opening.in_memory

    def configure(self, given: GivenSettings) -> StoreSettings:
        """Change the store's settings; other processes adopt them within a second.

        Raises:
            StoreUnavailable: the store cannot be used or written.
            ValueError: a value is out of range.
        """
        with self._translate_errors("the store cannot be configured"):
            self._opening.configure(given)
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
        entry = self._read(key, self._files.load, use=True)
        self.counts.add(misses=entry is None, hits=entry is not None)
        return entry

    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        return [self._read(key, load_header, use=False) for key in keys]

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        """Lease entries (see `Store.lease`). If leases cannot be written, all keys are misses."""
        found = [self._read(key, load_header, use=True) for key in keys]
        present = [key.digest for key, info in zip(keys, found, strict=True) if info]
        if not present:
            return found
        try:
            tree = self._opening.tree()
            add_leases(tree.leases, present, seconds, self._now(tree))
        except OSError as error:
            self._opening.handle_error(error)
            return [None] * len(keys)
        # Checked again: an evictor may have removed the entry before it saw the lease.
        return [
            info if info and tree.has_entry(key.digest) else None
            for key, info in zip(keys, found, strict=True)
        ]

    def claim(
        self, keys: Sequence[EntryKey], owner: str, seconds: float, *, wait: bool = True
    ) -> list[bool]:
        """Claim entries (see `Store.claim`). Of several owners at once, one gets a claim."""
        name = owner_bytes(owner)
        with self._translate_errors("claims could not be written"):
            tree = self._opening.tree(create=True)
            digests = [key.digest for key in keys]
            now = partial(self._now, tree)
            return take_claims(tree.claims, digests, name, seconds, now, wait=wait)

    def release(self, keys: Sequence[EntryKey], owner: str) -> None:
        name = owner_bytes(owner)
        with self._translate_errors("claims could not be released"):
            tree = self._opening.tree()
            for key in keys:
                give_back(tree.claims, key.digest, name, partial(self._now, tree))

    def delete(self, keys: Sequence[EntryKey]) -> int:
        with self._translate_errors("entries could not be deleted"):
            tree = self._opening.counted()
            return sum(self._delete(tree, key.digest) for key in keys)

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
        """Evict (see `Store.evict`), unless another process is evicting."""
        with self._translate_errors("the store cannot be evicted from"):
            return self._keeper.evict(self._opening.counted())

    def sweep(self, every_s: float = 0.0) -> int:
        """Sweep (see `Store.sweep`), unless another process is sweeping."""
        with self._translate_errors("the store cannot be swept"):
            tree = self._opening.counted()
            return self._keeper.sweep(tree, every_s) + self._keeper.evict(tree)

    def stats(self) -> StoreStats:
        with self._translate_errors("the store cannot be read"):
            tree = self._opening.counted()
            usage = self._keeper.ledger.total(tree.usage)
            quota_bytes = self._keeper.quota_bytes(tree.file_system())
            leased = count_leased(tree.leases, self._now(tree))
        return StoreStats(
            entries=max(0, usage.entries),
            bytes=max(0, usage.bytes),
            max_bytes=quota_bytes,
            leased=leased,
            **self._process_counts(),
        )

    def register_namespace(self, model: str, namespace: str) -> None:
        name = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest() + ".json"
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
        self._files.close()

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._opening.handle_error(error)
            raise self._problem(what, error) from error

    def _problem(self, what: str, error: OSError, advice: str = "") -> StoreUnavailable:
        if isinstance(error, FileNotFoundError) and not self._create:
            return StoreMissing(f"there is no store in {self._config.path}")
        return StoreUnavailable(f"{what}: {error.strerror or error}{advice}")

    def _now(self, tree: Tree) -> float:
        return self._keeper.clock.now(tree.root)

    def _put(self, key: EntryKey, entry: Entry, size: int, *, replace: bool) -> bool:
        self._opening.counted(create=True)
        if not replace:
            if self._read(key, load_header, use=True):
                return False
            self._forget_ignored(key.digest)
        evicted = False
        for room_bytes in (taken_bytes(size) << n for n in range(ROOM_MADE)):
            try:
                return self._write(
                    self._opening.tree(create=True), key, entry, size, replace=replace
                )
            except OSError as error:
                if error.errno in NO_ROOM:
                    if not self._keeper.free_space(self._opening.tree(), room_bytes):
                        break
                    evicted = True
                elif error.errno in {errno.ENOENT, errno.ESTALE}:
                    self._opening.reopen_later()  # the directory was removed while it was open
                else:
                    raise
        # The last time, with room or with the directory that is there now.
        try:
            return self._write(self._opening.tree(create=True), key, entry, size, replace=replace)
        except OSError as error:
            if evicted and error.errno in NO_ROOM:
                self._keeper.record_useless()
            raise

    def _forget_ignored(self, digest: str) -> None:
        """Remove an entry that readers ignore, but that occupies the name.

        It is renamed, checked again, and then removed, as evictors do: another writer may have
        published a new entry since the first check.
        """
        with suppress(OSError):
            tree = self._opening.tree()
            folder = tree.folder(digest)
            if not self._is_ignored(tree, folder, digest, digest):
                return
            aside = self._staging_name(tree, digest, folder.stat(digest).st_size)
            folder.rename(digest, aside)
            status = folder.stat(aside)
            ignored = False  # an entry that cannot be read gets its name back
            with suppress(OSError):
                ignored = self._is_ignored(tree, folder, aside, digest)
            restored = not ignored and folder.publish(aside, digest)
            if folder.remove(aside) and not restored:
                self._keeper.ledger.release(tree.usage, taken_bytes(status.st_size))

    def _is_ignored(self, tree: Tree, folder: Folder, name: str, digest: str) -> bool:
        """Return whether an entry is expired, too large or of another format. Raises OSError.

        Readers of another release may have leased an entry of their format: it is not ignored.
        """
        if not self._is_live(tree, folder.stat(name)):
            return True
        fd = folder.open(name, READ)
        try:
            load_header(None, fd, os.fstat(fd).st_size)
        except OtherFormat:
            return not leased_digests(tree.leases, [digest], self._now(tree))
        except CorruptEntry:  # quarantined by the next reader
            return False
        finally:
            _close(fd)
        return False

    # The ledger has the size of each entry from before its first byte until after its last file is
    # gone or in quarantine. Released by: `_write` if the entry is not published; `_replace` and
    # `_forget_ignored` for the entry before it; `_delete`, eviction and quarantine.
    def _write(self, tree: Tree, key: EntryKey, entry: Entry, size: int, *, replace: bool) -> bool:
        digest, taken = key.digest, taken_bytes(size)
        staging = self._staging_name(tree, digest, size)
        folder, fd = tree.create(digest, staging)
        charged = published = False
        try:
            try:
                # Charged after the staging file, which names its size, exists, and before its first
                # byte: no writer exceeds the quota while it checks.
                self._keeper.ledger.charge(tree.usage, taken)
                charged = True
                self._keeper.make_room(tree, taken)
                self._files.store(key, entry, fd)
                if self._config.durability == "fsync":
                    os.fsync(fd)
            finally:
                # NFS clients flush here, and report failed writes before the entry is published.
                os.close(fd)
            if replace:
                self._replace(tree, folder, staging, digest)
            published = replace or folder.publish(staging, digest)
        finally:
            removed = folder.remove(staging)
            if charged and not published:
                # A file that stays is released with the leftovers. An NFS client repeats a call if
                # the reply is lost: the first one may have removed it.
                with suppress(OSError):
                    if removed or not folder.has(staging):
                        self._keeper.ledger.release(tree.usage, taken)
        if published and self._config.durability == "fsync":
            tree.sync(digest)
        return published

    def _staging_name(self, tree: Tree, digest: str, size: int) -> str:
        return staging_name(digest, size, self._keeper.ledger.writer(tree.usage))

    def _replace(self, tree: Tree, folder: Folder, staging: str, digest: str) -> None:
        """Publish over an entry, and release its charge, as each removal of an entry does."""
        before = 0
        with suppress(OSError):
            before = taken_bytes(folder.stat(digest).st_size)
        folder.rename(staging, digest)
        if before:
            self._keeper.ledger.release(tree.usage, before)

    def _read(
        self, key: EntryKey, load: Callable[[EntryKey, int, int], T], *, use: bool
    ) -> T | None:
        """Open a live entry and call `load`; None if it is missing, corrupt or unreadable."""
        tree, digest = None, key.digest
        try:
            tree = self._opening.tree()
            fd = tree.open(digest)
        except OSError as error:
            self._opening.handle_error(error)
            if tree is not None and error.errno == errno.ELOOP:  # a link in place of an entry
                self._quarantine(tree, digest)
            return None
        try:
            status = os.fstat(fd)
            if not is_regular(status):
                self._quarantine(tree, digest, status.st_ino)
                return None
            if not self._is_live(tree, status):
                return None
            loaded = load(key, fd, status.st_size)
            if use:
                self._touch(tree, fd, status)
        except OSError as error:
            self._opening.handle_error(error)
        except OtherFormat:
            return None
        except CorruptEntry:
            self._quarantine(tree, digest, status.st_ino)
        else:
            return loaded
        finally:
            _close(fd)
        return None

    def _is_live(self, tree: Tree, status: os.stat_result) -> bool:
        age_s = self._keeper.clock.expiry_now(tree.root) - status.st_mtime
        # A larger entry, written under another process's limit, would exhaust the memory here.
        limit = self._config.max_entry_bytes + MAX_HEADER_BYTES
        return age_s <= self.settings.ttl and status.st_size <= limit

    def _touch(self, tree: Tree, fd: int, status: os.stat_result) -> None:
        """Record a use of an entry now, by the store's clock."""
        if self._now(tree) - status.st_mtime > min(TOUCH_EVERY_S, self.settings.ttl / 4):
            with suppress(OSError):  # a reader without write permission
                os.utime(fd)

    def _quarantine(self, tree: Tree, digest: str, inode: int | None = None) -> None:
        with suppress(OSError):
            if self._keeper.quarantine(tree, digest, inode):
                self.counts.add(corrupt=1)

    def _delete(self, tree: Tree, digest: str) -> bool:
        try:
            folder = tree.folder(digest)
            size = folder.stat(digest).st_size
            os.unlink(digest, dir_fd=folder.fd)
        except FileNotFoundError:
            return False
        self._keeper.ledger.release(tree.usage, taken_bytes(size))
        return True


def _close(fd: int) -> None:
    """Close a file that was read. A failure has no effect: what was read has been checked."""
    try:  # noqa: SIM105 - runs with every lookup, and suppress() is slower
        os.close(fd)
    except OSError:
        pass
