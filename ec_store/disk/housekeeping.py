"""Housekeeping of a shared directory: its quota, its expired entries, and leftovers of crashes."""

import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from os.path import ismount
from typing import NamedTuple

from ec_store.counts import Counts
from ec_store.disk import ledger
from ec_store.disk.claims import sweep_claims
from ec_store.disk.config import StoreSettings
from ec_store.disk.eviction_policy import (
    BATCH,
    BLOCK_BYTES,
    HIGH_WATER,
    FileSystem,
    choose_victims,
    excess_bytes,
    sample_size,
    taken_bytes,
)
from ec_store.disk.files import NO_ROOM, READ, close_quietly
from ec_store.disk.leases import leased_digests, sweep_leases
from ec_store.disk.ledger import LedgerLost, Usage
from ec_store.disk.lock import try_lock, unlock
from ec_store.disk.tree import Found, Tree, remove_staging, used_s
from ec_store.errors import EntryTooLarge, StoreUnavailable

logger = logging.getLogger("vllm.ec_store")

TIDY_EVERY_S = 900.0
"""Longest time in seconds between two removals of expired leases and claims by one process."""

SAMPLES = 4
"""Consecutive samples without a removal after which the store counts as having nothing to evict."""

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

Lacking = Callable[[Usage, int], int]
"""Function that returns how many bytes to free, from the present sums of the ledger and from the
bytes that were freed already."""


class Freed(NamedTuple):
    """Result of an eviction.

    Attributes:
        bytes: bytes that were freed.
        full: whether no entry may be evicted. False if other processes removed the entries first,
            or used them meanwhile.
        all_seen: whether the last sample was the whole store.
    """

    bytes: int
    full: bool = False
    all_seen: bool = False


class Housekeeping:
    """Housekeeping of one store, by any process.

    The cost of a call does not depend on the number of entries, except for `sweep`. Several
    processes may evict at once: each reads the ledger again before each batch.

    Attributes:
        settings: settings of the store, as last read; they apply to every process that opens it.
    """

    def __init__(self, counts: Counts, *, restores: bool) -> None:
        """Create the object without access to a store.

        `counts` gets `evictions`, and observes `eviction_seconds`. `restores` allows this process
        to count the entries of a directory without a ledger.
        """
        self._counts = counts
        self._restores = restores
        self.settings = StoreSettings()
        self._fruitless_until_s = float("-inf")
        self._useless_until_s = float("-inf")
        self._tidied_s = float("-inf")
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
        """Free room for an entry that will be written.

        With it, the usage is within the quota, and the file system keeps its reserve; entries that
        other processes write at this moment come on top.

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
            lacking = partial(self._lacking, file_system, coming_bytes)
            if lacking(self.usage(tree), 0) <= 0:
                self._reserve_kept = True
                break
            if time.monotonic() < self._fruitless_until_s:
                if file_system.lacking_bytes(coming_bytes):
                    self._warn(file_system)
                raise StoreUnavailable("the store is full, and none of its entries can be evicted")
            ahead_bytes = min(AHEAD * coming_bytes, int(quota * (1 - HIGH_WATER)))
            lacking = partial(self._lacking, file_system, coming_bytes + ahead_bytes)
            freed = self._free(tree, lacking)
            if freed.full:
                self._fruitless_until_s = time.monotonic() + FRUITLESS_S
            elif not freed.bytes:  # other processes removed or used the chosen entries first
                if time.monotonic() >= deadline_s:
                    text = "the store is full, and other processes evict or use its entries"
                    raise StoreUnavailable(text)
                time.sleep(random.uniform(PAUSE_S / 10, PAUSE_S))  # noqa: S311
        self._tidy_if_due(tree)

    def _lacking(self, file_system: FileSystem, coming_bytes: int, used: Usage, freed: int) -> int:
        return max(
            file_system.lacking_bytes(coming_bytes) - freed,
            used.bytes + coming_bytes - self.quota_bytes(file_system),
        )

    def free_space(self, tree: Tree, size_bytes: int) -> bool:
        """Try to evict `size_bytes` after a write failed for lack of space.

        The file system may still report free space, for example under a user's quota.

        Returns:
            Whether this or other processes removed entries. False for `USELESS_S` after
            `record_useless`.

        Raises:
            OSError: entries cannot be read.
        """
        if time.monotonic() < self._useless_until_s:
            return False
        return not self._free(tree, lambda _, freed_bytes: size_bytes - freed_bytes).full

    def record_useless(self) -> None:
        """Record that a write failed for lack of space although `free_space` evicted for it."""
        self._useless_until_s = time.monotonic() + USELESS_S

    def evict(self, tree: Tree) -> int:
        """Free room ahead of writers, and remove the expired entries of a small sample.

        Returns:
            Number of removed entries.
        """
        file_system = tree.file_system()

        def lacking(used: Usage, freed: int) -> int:
            missing = file_system.lacking_files * max(BLOCK_BYTES, used.mean_bytes)
            return max(
                excess_bytes(used.bytes, self.quota_bytes(file_system)),
                file_system.lacking_bytes(0) - freed,
                missing - freed,
            )

        before = self._counts["evictions"]
        self._free(tree, lacking)
        self._evict_sample(tree, 0)
        self._tidy_if_due(tree)
        return self._counts["evictions"] - before

    def sweep(self, tree: Tree, every_s: float) -> int:
        """Read all entries: remove the expired ones, and correct the ledger.

        The duration grows with the number of entries. Writers are not blocked. The sweep is skipped
        if any process has started one less than `every_s` seconds ago.

        Returns:
            Number of removed entries.

        Raises:
            OSError: entries cannot be read, or the ledger cannot be changed.
        """
        if not _due(tree, min(every_s, self.settings.ttl)):
            return 0
        try:
            tree.root.replace("swept", b"")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        before, evicted = self.usage(tree), self._counts["evictions"]
        expired: list[Found] = []
        unread: list[OSError] = []
        size_bytes = entries = 0
        for found in tree.scan(unread, clean=True):
            size_bytes += taken_bytes(found.size_bytes)
            entries += 1
            if time.time() - found.used_s > self.settings.ttl:
                expired.append(found)
        if not unread:
            ledger.correct(tree.root, before, size_bytes, entries)
        for first in range(0, len(expired), BATCH):
            self._remove(tree, expired[first : first + BATCH])
        _tidy(tree)
        return self._counts["evictions"] - evicted

    def usage(self, tree: Tree) -> Usage:
        """Return the sums of the ledger. If it is missing or damaged, all files are counted first.

        Meanwhile no other process writes, since it cannot charge an entry. The count takes seconds
        at 100,000 entries.

        Raises:
            LedgerLost: it is missing or damaged, and this process may not count.
            OSError: the ledger or the files cannot be read.
        """
        try:
            return ledger.total(tree.root)
        except LedgerLost:
            if not self._restores:
                raise
        unread: list[OSError] = []
        sizes = [taken_bytes(found.size_bytes) for found in tree.scan(unread)]
        for error in unread:
            if not isinstance(error, PermissionError):
                raise error
        usage = Usage(charged_bytes=sum(sizes), charged=len(sizes))
        if not ledger.create(tree.root, usage):
            ledger.restore(tree.root, usage)
        return ledger.total(tree.root)

    def _free(self, tree: Tree, lacking: Lacking) -> Freed:
        """Evict the least recently used of random samples until nothing is lacking.

        The cost depends on the bytes to free, not on the number of entries in the store.

        Raises:
            OSError: nothing was evicted, and entries could not be read; or the ledger cannot be
                changed, as while a process that keeps it locked is stopped.
        """
        started_s = time.monotonic()
        freed = fruitless = 0
        last = Freed(0)
        while (excess := lacking(self.usage(tree), freed)) > 0:
            last = self._evict_sample(tree, excess)
            freed += last.bytes
            fruitless = 0 if last.bytes else fruitless + 1
            if fruitless and (last.all_seen or fruitless == SAMPLES):
                break
        if fruitless or freed:
            self._counts.observe("eviction_seconds", time.monotonic() - started_s)
        return Freed(freed, full=last.full and not freed)

    def _evict_sample(self, tree: Tree, excess: int) -> Freed:
        """Evict the expired entries of a random sample, and others to free `excess` bytes."""
        before, now = self.usage(tree), time.time()
        wanted = sample_size(excess, before.mean_bytes)
        unread: list[OSError] = []
        sample = list(islice(tree.scan(unread, clean=True), wanted))
        all_seen = len(sample) < wanted and not unread
        if all_seen:
            size_bytes = sum(taken_bytes(found.size_bytes) for found in sample)
            ledger.correct(tree.root, before, size_bytes, len(sample))
        choose = partial(
            choose_victims, all_seen=all_seen, now_s=now, ttl_s=self.settings.ttl, excess=excess
        )
        victims = choose(sample)
        # Leases are read only for the entries that would be evicted.
        while leased := leased_digests(
            tree.leases, [victim.digest for victim in victims], time.time()
        ):
            sample = [found for found in sample if found.digest not in leased]
            victims = choose(sample)
        freed, removable = self._remove(tree, victims)
        if unread and not freed and excess:
            raise unread[0]
        return Freed(freed, full=not removable, all_seen=all_seen)

    def _remove(self, tree: Tree, victims: Sequence[Found]) -> tuple[int, int]:
        """Remove entries, except those used or leased since they were sampled.

        They are locked meanwhile, as a process that leases an entry does.

        Returns:
            Bytes freed, and the number of entries that this process is able to remove.

        Raises:
            OSError: the ledger cannot be changed, or another process keeps it locked.
        """
        freed = removable = 0
        removed: list[Found] = []
        if not victims:
            return freed, removable
        # Waits here, with no entry locked, for a process that was stopped with the ledger locked.
        with ledger.changing(tree.root):
            pass
        with ExitStack() as locks:
            locked: list[Found] = []
            for victim in victims:
                with suppress(OSError):
                    if _lock_unused(victim, locks):
                        locked.append(victim)
                    removable += 1
            leased = leased_digests(tree.leases, [victim.digest for victim in locked], time.time())
            unleased = [victim for victim in locked if victim.digest not in leased]
            # The kernel frees the bytes when the files are closed, after the ledger is unlocked.
            with ledger.changing(tree.root) as change:
                for victim in unleased:
                    try:
                        freed += ledger.remove_locked(
                            change, victim.folder, victim.digest, victim.inode
                        )
                    except FileNotFoundError:
                        continue
                    except OSError:
                        removable -= 1
                        continue
                    removed.append(victim)
        for victim in removed:
            tree.remove_empty(victim.digest)
        self._counts.add(evictions=len(removed))
        return freed, removable

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

    def _tidy_if_due(self, tree: Tree) -> None:
        if time.monotonic() > self._tidied_s + min(TIDY_EVERY_S, self.settings.ttl / 4):
            self._tidied_s = time.monotonic()
            with suppress(OSError):
                self._evict_sample(tree, 0)
                _tidy(tree)


def _tidy(tree: Tree) -> None:
    """Remove expired leases, claims and leftover files. Raises OSError."""
    sweep_leases(tree.leases, time.time())
    sweep_claims(tree.claims)
    for folder in (tree.root, tree.namespaces, tree.claims):
        for name in folder.names():
            remove_staging(folder, name)


def _lock_unused(victim: Found, locks: ExitStack) -> bool:
    """Lock an entry; False if it is in use, or was used or replaced since it was sampled."""
    try:
        fd = victim.folder.open(victim.digest, READ)
    except FileNotFoundError:  # another process has removed it
        return False
    locks.callback(close_quietly, fd)
    if not try_lock(fd):
        return False
    locks.callback(unlock, fd)
    status = os.fstat(fd)
    return used_s(status) <= victim.used_s and status.st_ino == victim.inode


def _due(tree: Tree, every_s: float) -> bool:
    """Return whether no process has swept for `every_s` seconds."""
    try:
        age_s = time.time() - tree.root.stat("swept").st_mtime
    except FileNotFoundError:
        return True
    # A new marker may be ahead of the clock; one far ahead is older than a clock set back.
    return every_s <= 0 or abs(age_s) >= every_s
