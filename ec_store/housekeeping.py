"""Keeps a shared directory within its quota, and free of what crashes leave."""

import logging
import random
import secrets
import time
from contextlib import suppress
from os.path import ismount

from ec_store.claims import Claims
from ec_store.counts import Counts
from ec_store.disk_settings import StoreSettings
from ec_store.errors import EntryTooLarge, StoreUnavailable
from ec_store.eviction import HIGH_WATER, FileSystem, excess_bytes, taken_bytes
from ec_store.evictor import STAGING_S, Evictor, Freed
from ec_store.files import StoreClock, regular
from ec_store.leases import Leases
from ec_store.ledger import Ledger
from ec_store.lock import FileLock
from ec_store.tree import Tree

logger = logging.getLogger("vllm.ec_store")

QUARANTINE_S = 86400.0
QUARANTINED = 64
TIDY_EVERY_S = 900.0
WAIT_S = 5.0
"""How long a writer waits for room that another process is making, before it drops its entry."""

PAUSES_S = (0.002, 0.1)
"""The first and the longest pause of a writer that waits; each is twice the one before."""

FRUITLESS_S = 1.0
"""How long a store that nothing can be removed from is taken for full without looking again."""

AHEAD = 8
"""A writer frees room for so many entries of its own size, so that the next ones find some."""


class Housekeeping:
    """Makes room, and removes leftovers. Any process may, one does at a time, and none has to.

    What a call costs does not depend on how many entries there are, but for `sweep`.

    Attributes:
        settings: the store's, as they were last read.
    """

    def __init__(self, counts: Counts) -> None:
        """Look at nothing yet.

        Args:
            counts: observes `eviction_seconds`.
        """
        self.clock = StoreClock()
        self.ledger = Ledger()
        self.leases = Leases()
        self.claims = Claims()
        self.settings = StoreSettings()
        self._evictor = Evictor(self.clock, self.ledger, self.leases, counts)
        self._sweeping = FileLock("sweeping")
        self._fruitless_until_s = float("-inf")
        self._tidy_looked_s = float("-inf")
        self._reserve_kept = True

    def renew_locks(self) -> None:
        """Begin with free locks, in a child of `fork`."""
        self._evictor.renew_locks()
        self.ledger.renew_locks()
        self.clock.renew_locks()

    @property
    def evictions(self) -> int:
        """How many entries this process removed."""
        return self._evictor.evictions

    def quota_bytes(self, tree: Tree) -> int:
        """What the store may take at the moment."""
        return self._quota_bytes(tree.file_system())

    def _quota_bytes(self, file_system: FileSystem) -> int:
        return file_system.quota_bytes(self.settings.max_bytes, self.settings.max_share)

    def log_limits(self, tree: Tree, path: str) -> None:
        """Log what is left to others, where the store is in a file system that others use."""
        file_system = tree.file_system()
        if file_system.size_bytes and not ismount(path):
            logger.info(
                "the encoder cache in %s takes at most %.2f GiB of a file system of %.2f GiB, and "
                "leaves %.2f GiB of it free for others",
                path,
                self._quota_bytes(file_system) / 2**30,
                file_system.size_bytes / 2**30,
                file_system.reserve_bytes / 2**30,
            )

    def make_room(self, tree: Tree, coming_bytes: int) -> None:
        """Free room for an entry that is charged and not written yet.

        Afterwards the usage is within the quota, and the file system will keep its reserve.

        Raises:
            EntryTooLarge: it takes more than the whole quota.
            StoreUnavailable: nothing more can be removed, or another process takes long to.
        """
        patience = _Patience()
        while True:
            file_system = tree.file_system()
            quota = self._quota_bytes(file_system)
            if coming_bytes > quota:
                raise EntryTooLarge(f"it takes {coming_bytes} bytes of a quota of {quota}")
            reserved = file_system.lacking_bytes(coming_bytes)
            lacking = max(reserved, self.ledger.total(tree.usage).bytes - quota)
            if lacking <= 0:
                self._reserve_kept = True
                break
            if time.monotonic() < self._fruitless_until_s:
                if reserved:
                    self._warn(file_system)
                raise StoreUnavailable("the store is full of what cannot be evicted")
            ahead = min(AHEAD * coming_bytes, int(quota * (1 - HIGH_WATER)))
            if self._free_or_wait(tree, lacking + ahead, coming_bytes, patience).full:
                self._fruitless_until_s = time.monotonic() + FRUITLESS_S
        self._tidy_if_due(tree)

    def free(self, tree: Tree, size_bytes: int) -> None:
        """Evict entries of `size_bytes`: the file system has no room for one, whatever it says.

        Raises:
            StoreUnavailable: another process is evicting, and takes long.
        """
        patience = _Patience()
        while self._free_or_wait(tree, size_bytes, size_bytes, patience) == (0, False):
            pass

    def evict(self, tree: Tree) -> int | None:
        """Free room ahead of writers, and remove what is expired among a few entries.

        Returns:
            How many entries were removed; None where another process is evicting.
        """
        file_system = tree.file_system()
        quota = self._quota_bytes(file_system)
        used = self.ledger.total(tree.usage).bytes
        excess = max(excess_bytes(used, quota), file_system.lacking_bytes(0))
        before = self.evictions
        if self._evictor.free(tree, excess, self.settings.ttl) is None:
            return None
        self._tidy_if_due(tree)
        return self.evictions - before

    def sweep(self, tree: Tree, every_s: float) -> int:
        """Look at all entries: remove the expired ones, and correct the ledger.

        This takes as long as there are entries. Writers are not held up.

        Args:
            tree: the store.
            every_s: a sweep that began so lately, in any process, is enough.

        Returns:
            How many entries were removed; 0 where another process is at it.
        """
        if not self._due(tree, "swept", min(every_s, self.settings.ttl)):
            return 0
        if not self._sweeping.acquire(tree.root, lambda: self.clock.now(tree.root)):
            return 0
        before = self.evictions
        try:
            _mark(tree, "swept")
            self._evictor.sweep(tree, self.settings.ttl, lambda: self._sweeping.held(tree.root))
            self._tidy(tree)
        finally:
            self._sweeping.release(tree.root)
        return self.evictions - before

    def _free_or_wait(
        self, tree: Tree, size_bytes: int, own_bytes: int, patience: "_Patience"
    ) -> Freed:
        """Free `size_bytes`, or `own_bytes` where another process is evicting.

        There is a pause where other processes were faster. A store is only full when no other
        process is evicting from it.
        """
        freed = self._evictor.free(tree, size_bytes, self.settings.ttl)
        if freed is None:
            patience.check()
            beside = self._evictor.free_beside(tree, own_bytes, self.settings.ttl)
            freed = Freed(beside.bytes, full=False)
        if freed == (0, False):
            patience.pause()
        return freed

    def _warn(self, file_system: FileSystem) -> None:
        """Say once, until it is mended, that others leave less than the reserve."""
        if self._reserve_kept:
            logger.warning(
                "the encoder cache drops entries: its file system has %d bytes free, %d are "
                "reserved for others, and nothing more can be evicted. Free some, or give the "
                "store a file system of its own",
                file_system.free_bytes,
                file_system.reserve_bytes,
            )
        self._reserve_kept = False

    def _tidy_if_due(self, tree: Tree) -> None:
        every_s = min(TIDY_EVERY_S, self.settings.ttl / 4)
        if time.monotonic() < self._tidy_looked_s + every_s / 4:
            return
        self._tidy_looked_s = time.monotonic()
        with suppress(OSError):
            if self._due(tree, "tidied", every_s):
                _mark(tree, "tidied")
                self._evictor.free(tree, 0, self.settings.ttl)
                self._tidy(tree)

    def _due(self, tree: Tree, mark: str, every_s: float) -> bool:
        """Whether what leaves this mark was done long ago, by any process."""
        try:
            age_s = self.clock.now(tree.root) - tree.root.stat(mark).st_mtime
        except FileNotFoundError:
            return True
        return every_s <= 0 or age_s >= every_s  # a mark just left may be ahead of the clock

    def _tidy(self, tree: Tree) -> None:
        """Remove what is neither entry nor needed; entries are not looked at."""
        now = self.clock.now(tree.root)
        self.leases.sweep(tree.leases, now)
        self.claims.sweep(tree.claims, lambda: self.clock.now(tree.root))
        self.ledger.merge(tree.usage, now)
        for folder, age_s in (
            (tree.root, STAGING_S),
            (tree.namespaces, STAGING_S),
            (tree.quarantine, QUARANTINE_S),
        ):
            for name in folder.names():
                if folder is tree.quarantine or (name[0] == "." and name.endswith(".tmp")):
                    with suppress(OSError):
                        if now - folder.stat(name).st_ctime > age_s:
                            folder.remove(name)

    def quarantine(self, tree: Tree, digest: str, inode: int | None) -> bool:
        """Move a corrupt entry aside; False where it is gone, or another by now.

        Some are kept for who wants to know why, and the rest is removed.
        """
        folder = tree.folder(digest)
        status = folder.stat(digest)
        if inode not in {None, status.st_ino}:
            return False
        sizes = []
        for name in tree.quarantine.names():
            with suppress(OSError):
                sizes.append(tree.quarantine.stat(name).st_size)
        full = (
            len(sizes) >= QUARANTINED or sum(sizes) + status.st_size > self.settings.max_bytes // 16
        )
        if full and regular(status):
            gone = folder.remove(digest)
        else:
            folder.rename(digest, f"{digest}.{secrets.token_hex(8)}", tree.quarantine)
            gone = True
        if gone and regular(status):
            self.ledger.release(tree.usage, taken_bytes(status.st_size))
        return gone


class _Patience:
    """How long a writer goes on while another process is evicting."""

    def __init__(self) -> None:
        self._deadline_s = time.monotonic() + WAIT_S
        self._pause_s, self._longest_s = PAUSES_S

    def check(self) -> None:
        """Raise StoreUnavailable where it has taken too long."""
        if time.monotonic() >= self._deadline_s:
            raise StoreUnavailable("the store is full and still being evicted from")

    def pause(self) -> None:
        """Wait, each time longer. Raises StoreUnavailable where it has taken too long."""
        self.check()
        time.sleep(random.uniform(self._pause_s / 2, self._pause_s))  # noqa: S311
        self._pause_s = min(2 * self._pause_s, self._longest_s)


def _mark(tree: Tree, name: str) -> None:
    with suppress(OSError):
        tree.root.replace(name, b"")
