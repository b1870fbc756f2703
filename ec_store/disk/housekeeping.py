"""Housekeeping of a shared directory: its quota, its expired entries, and leftovers of crashes."""

import logging
import random
import time
from contextlib import suppress
from functools import partial
from os.path import ismount

from ec_store.counts import Counts
from ec_store.disk.claims import sweep_claims
from ec_store.disk.config import StoreSettings
from ec_store.disk.eviction_policy import (
    BLOCK_BYTES,
    HIGH_WATER,
    FileSystem,
    excess_bytes,
    taken_bytes,
)
from ec_store.disk.evictor import Evictor
from ec_store.disk.leases import sweep_leases
from ec_store.disk.ledger import Ledger, LedgerLost, Usage
from ec_store.disk.tree import Tree
from ec_store.errors import EntryTooLarge, StoreUnavailable

logger = logging.getLogger("vllm.ec_store")

STAGING_S = 3600.0
"""Age in seconds from which a staging file of a small file counts as left by a crash."""

TIDY_EVERY_S = 900.0
"""Longest time in seconds between two removals of leftovers of crashes."""

WAIT_S = 5.0
"""Upper bound in seconds of a writer's attempts to evict entries that other processes remove or use
first. After it, the entry is dropped."""

PAUSE_S = 0.02
"""Longest pause in seconds between two of these attempts."""

FRUITLESS_S = 1.0
"""Seconds for which a store without evictable entries counts as full without another check."""

USELESS_S = 30.0
"""Seconds for which no room is made for failed writes after an eviction that did not help, as under
a quota that entries of this store do not count for: each write would evict, and fail."""

AHEAD = 8
"""Multiple of its entry's size that a writer frees beyond what is lacking, as far as the quota has
a margin, so that the next writers find room."""

_LIMITS_LOGGED = set[str]()
"""Paths of stores with limits that this process has logged: an engine opens its store twice."""


class Housekeeping:
    """Housekeeping of one store, by any process.

    The cost of a call does not depend on the number of entries, except for `sweep`.

    Attributes:
        settings: settings of the store, as last read; they apply to every process that opens it.
    """

    def __init__(self, counts: Counts) -> None:
        """Create the object without access to a store.

        `counts` gets `evictions`, and observes `eviction_seconds`.
        """
        self._counts = counts
        self.ledger = Ledger()
        self.settings = StoreSettings()
        self._evictor = Evictor(self.ledger, counts)
        self._fruitless_until_s = float("-inf")
        self._useless_until_s = float("-inf")
        self._tidy_looked_s = float("-inf")
        self._reserve_kept = True

    def quota_bytes(self, file_system: FileSystem) -> int:
        """Return the effective quota in bytes at the moment."""
        return file_system.quota_bytes(self.settings.max_bytes, self.settings.max_share)

    def log_limits(self, tree: Tree, path: str) -> None:
        """Log the limits of a store that shares its file system with other files, once."""
        file_system = tree.file_system()
        if file_system.size_bytes and not ismount(path) and path not in _LIMITS_LOGGED:
            _LIMITS_LOGGED.add(path)
            logger.info(
                "the encoder store in %s takes at most %.2f GiB of a file system of %.2f GiB, and "
                "leaves %.2f GiB of it free for others",
                path,
                self.quota_bytes(file_system) / 2**30,
                file_system.size_bytes / 2**30,
                file_system.reserve_bytes / 2**30,
            )

    def make_room(self, tree: Tree, coming_bytes: int) -> None:
        """Free room for an entry that is charged and not written yet.

        Afterwards the usage is within the quota, and the file system keeps its reserve.

        Raises:
            EntryTooLarge: the entry is larger than the whole quota.
            StoreUnavailable: no more entries can be removed, or other processes are faster for too
                long.
            OSError: entries cannot be read.
        """
        deadline_s = time.monotonic() + WAIT_S
        while True:
            file_system = tree.file_system()
            quota = self.quota_bytes(file_system)
            if coming_bytes > quota:
                raise EntryTooLarge(f"it takes {coming_bytes} bytes of a quota of {quota}")
            lacking = partial(self._lacking, file_system, coming_bytes, 0)
            if lacking(self.ledger.total(tree.root)) <= 0:
                self._reserve_kept = True
                break
            if time.monotonic() < self._fruitless_until_s:
                if file_system.lacking_bytes(coming_bytes):
                    self._warn(file_system)
                raise StoreUnavailable("the store is full, and none of its entries can be evicted")
            ahead_bytes = min(AHEAD * coming_bytes, int(quota * (1 - HIGH_WATER)))
            ahead = partial(self._lacking, file_system, coming_bytes, ahead_bytes)
            freed = self._evictor.free_space(tree, ahead, self.settings.ttl)
            if freed.full:
                self._fruitless_until_s = time.monotonic() + FRUITLESS_S
            elif not freed.bytes:
                _pause(deadline_s)
        self._clean_if_due(tree)

    def _lacking(
        self, file_system: FileSystem, coming_bytes: int, ahead_bytes: int, used: Usage
    ) -> int:
        return max(
            file_system.lacking_bytes(coming_bytes + ahead_bytes),
            used.bytes + ahead_bytes - self.quota_bytes(file_system),
        )

    def free_space(self, tree: Tree, size_bytes: int) -> bool:
        """Try to evict `size_bytes` after a write failed for lack of space.

        The file system may still report free space, for example under a user's quota.

        Returns:
            Whether entries were evicted, also if only fewer bytes. False for `USELESS_S` after
            `record_useless`.

        Raises:
            StoreUnavailable: other processes are faster for too long.
            OSError: entries cannot be read.
        """
        if time.monotonic() < self._useless_until_s:
            return False
        deadline_s = time.monotonic() + WAIT_S
        while True:
            freed = self._evictor.free_space(tree, lambda _: size_bytes, self.settings.ttl)
            if freed.bytes or freed.full:
                return not freed.full
            _pause(deadline_s)

    def record_useless(self) -> None:
        """Record that a write failed for lack of space although `free_space` evicted for it."""
        self._useless_until_s = time.monotonic() + USELESS_S

    def evict(self, tree: Tree) -> int:
        """Free room ahead of writers, and remove the expired entries of a small sample.

        Returns:
            Number of removed entries.
        """
        file_system = tree.file_system()

        def lacking(used: Usage) -> int:
            return max(
                excess_bytes(used.bytes, self.quota_bytes(file_system)),
                file_system.lacking_bytes(0),
                file_system.lacking_files * max(BLOCK_BYTES, used.mean_bytes),
            )

        before = self._counts["evictions"]
        self._evictor.free_space(tree, lacking, self.settings.ttl)
        self._clean_if_due(tree)
        return self._counts["evictions"] - before

    def sweep(self, tree: Tree, every_s: float) -> int:
        """Read all entries: remove the expired ones, and correct the ledger.

        The duration grows with the number of entries. Writers are not blocked. The sweep is skipped
        if any process has started one less than `every_s` seconds ago.

        Returns:
            Number of removed entries; 0 if another process is sweeping.
        """
        if not self._due(tree, "swept", min(every_s, self.settings.ttl)):
            return 0
        before = self._counts["evictions"]
        with self.ledger.sweeping(tree.root) as held:
            if not held:
                return 0
            _set_marker(tree, "swept")
            self._evictor.sweep(tree, self.settings.ttl)
            self._clean_leftovers(tree)
        return self._counts["evictions"] - before

    def restore_ledger(self, tree: Tree) -> None:
        """Count all files for a ledger that is missing or damaged.

        Meanwhile no other process writes, since it cannot charge an entry. Raises OSError.
        """
        with suppress(LedgerLost):
            self.ledger.total(tree.root)
            return
        self.ledger.discard_damaged(tree.root)
        unread: list[OSError] = []
        found = tree.scan(unread)
        sizes = [taken_bytes(file.size_bytes) for file in found if file.is_charged]
        for error in unread:
            if not isinstance(error, PermissionError):
                raise error
        self.ledger.create(tree.root, Usage(charged_bytes=sum(sizes), charged=len(sizes)))

    def _warn(self, file_system: FileSystem) -> None:
        if self._reserve_kept:
            logger.warning(
                "the encoder store drops entries: its file system has %d bytes free, %d are "
                "reserved for others, and no more entries can be evicted. Free some, or give the "
                "store a file system of its own",
                file_system.free_bytes,
                file_system.reserve_bytes,
            )
        self._reserve_kept = False

    def _clean_if_due(self, tree: Tree) -> None:
        every_s = min(TIDY_EVERY_S, self.settings.ttl / 4)
        if time.monotonic() < self._tidy_looked_s + every_s / 4:
            return
        self._tidy_looked_s = time.monotonic()
        with suppress(OSError):
            if self._due(tree, "tidied", every_s):
                _set_marker(tree, "tidied")
                self._evictor.free_space(tree, lambda _: 0, self.settings.ttl)
                self._clean_leftovers(tree)

    def _due(self, tree: Tree, marker: str, every_s: float) -> bool:
        """Return whether no process has run this marker's task for `every_s` seconds."""
        try:
            age_s = time.time() - tree.root.stat(marker).st_mtime
        except FileNotFoundError:
            return True
        # A new marker may be ahead of the clock; one far ahead is older than a clock set back.
        return every_s <= 0 or abs(age_s) >= every_s

    def _clean_leftovers(self, tree: Tree) -> None:
        """Remove expired leases, claims and leftover files; entries are not read."""
        sweep_leases(tree.leases, time.time())
        sweep_claims(tree.claims)
        now = time.time()
        for folder in (tree.root, tree.namespaces):
            for name in folder.names():
                if name[0] == "." and name.endswith(".tmp"):
                    with suppress(OSError):
                        if now - folder.stat(name).st_ctime > STAGING_S:
                            folder.remove(name)


def _pause(deadline_s: float) -> None:
    """Wait a moment, since other processes removed or used the chosen entries first.

    Raises StoreUnavailable after the deadline.
    """
    if time.monotonic() >= deadline_s:
        raise StoreUnavailable("the store is full, and other processes evict or use its entries")
    time.sleep(random.uniform(PAUSE_S / 10, PAUSE_S))  # noqa: S311


def _set_marker(tree: Tree, name: str) -> None:
    with suppress(OSError):
        tree.root.replace(name, b"")
