"""Eviction of entries from a shared directory, and removal of files that crashes left."""

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from typing import NamedTuple

from ec_store.counts import Counts
from ec_store.disk.clock import StoreClock
from ec_store.disk.eviction_policy import (
    EvictionCandidate,
    choose_victims,
    sample_size,
    taken_bytes,
)
from ec_store.disk.files import NO_ROOM, READ, Folder, close_quietly
from ec_store.disk.leases import leased_digests
from ec_store.disk.ledger import EVICTING, SWEEPING, Count, Ledger, Usage
from ec_store.disk.lock import is_locked, lock
from ec_store.disk.tree import Found, Tree, staging_name

CHARGE_S = 10.0
"""Age in seconds up to which a staging file may not be charged yet, or may be published already."""

YOUNG_S = 0.25
"""Age in seconds up to which the process of a staging file counts as alive: it may not have locked
the file yet. Most writes take less, so an eviction tests few locks."""

COUNTED = 100
"""Entries that are counted for each leftover, on average, or for each mean size of leftovers. Its
process may have died between a file and its charge or release. Such errors add up."""

RELEASE_S = 0.05
"""Time in seconds within which a process that has removed a file changes the ledger."""

SAMPLES = 4
"""Consecutive samples without a removal after which the store counts as having nothing to evict."""


class Freed(NamedTuple):
    """Result of an eviction.

    Attributes:
        bytes: bytes that were freed.
        full: whether no entry may be evicted. False if other processes removed the entries first,
            or used them meanwhile.
    """

    bytes: int
    full: bool


class Evicted(NamedTuple):
    """Result of an eviction from one sample.

    Attributes:
        bytes: bytes that were freed.
        found: whether there was a file to remove.
        all_seen: whether the sample was the whole store.
        unread: errors of folders and files that could not be read.
    """

    bytes: int
    found: bool
    all_seen: bool
    unread: Sequence[OSError]


Lacking = Callable[[Usage], int]
"""Function that returns how many bytes to free, from the present sum of the ledger."""


class Evictor:
    """Remover of entries, which also releases their usage in the ledger."""

    def __init__(self, clock: StoreClock, ledger: Ledger, counts: Counts) -> None:
        self.young_s = YOUNG_S
        self._counts = counts
        self._clock = clock
        self._ledger = ledger

    def free_space(self, tree: Tree, lacking: Lacking, ttl_s: float) -> Freed | None:
        """Evict the least recently used of a random sample, and its expired entries.

        The cost depends on the bytes to free, not on the number of entries in the store. If nothing
        is lacking, only the expired entries of one small sample are evicted.

        Returns:
            The result; None if another process is evicting.

        Raises:
            OSError: nothing was evicted, and entries could not be read.
        """
        with self._ledger.locked(tree.root, EVICTING) as held:
            return self._free_timed(tree, lacking, ttl_s, alone=True) if held else None

    def free_beside(self, tree: Tree, lacking: Lacking, ttl_s: float) -> Freed:
        """Evict without the lock, for an entry that has to be written.

        A writer that frees only the size of its own entry needs no lock. All writers together free
        what they write, and if two remove the same entry, the second gets ENOENT.
        """
        return self._free_timed(tree, lacking, ttl_s, alone=False)

    def sweep(self, tree: Tree, ttl_s: float) -> None:
        """Read all entries: remove the expired ones, and correct the ledger.

        The caller holds `SWEEPING`: two processes that corrected the ledger at once would both
        apply the same correction.
        """
        count = Count(self._ledger.total(tree.root))
        for candidate in self._counted(tree, count):
            expired = self._clock.expiry_now() - candidate.used_s > ttl_s
            if expired and (freed := self._remove(tree, [candidate])[0]):
                count.remove(freed)
        self._correct(tree, count)

    def _free_timed(self, tree: Tree, lacking: Lacking, ttl_s: float, *, alone: bool) -> Freed:
        started_s = time.monotonic()
        before = self._ledger.total(tree.root)
        excess = lacking(before)
        if excess <= 0:
            return Freed(self._evict_sample(tree, before, 0, ttl_s, alone=alone).bytes, full=False)
        try:
            return self._free(tree, excess, lacking, ttl_s, alone=alone)
        finally:
            self._counts.observe("eviction_seconds", time.monotonic() - started_s)

    def _free(
        self, tree: Tree, excess: int, lacking: Lacking, ttl_s: float, *, alone: bool
    ) -> Freed:
        """Evict until `excess` bytes are freed, nothing is lacking, or no entry can be evicted.

        Other processes evict meanwhile, so the ledger is read again before each batch. It is
        corrected only by the holder of the lock (`alone`), as in `sweep`.
        """
        freed = fruitless = 0
        unread: list[OSError] = []
        while freed < excess:
            before = self._ledger.total(tree.root)
            left = min(excess - freed, lacking(before))
            if left <= 0:
                break
            evicted = self._evict_sample(tree, before, left, ttl_s, alone=alone)
            freed += evicted.bytes
            if evicted.found:
                fruitless, unread = 0, []
                if not evicted.bytes:  # others removed them: the caller reads the ledger again
                    break
                continue
            fruitless += 1
            unread += evicted.unread
            if evicted.all_seen or fruitless == SAMPLES:
                if unread and not freed and not evicted.all_seen:
                    raise unread[0]
                return Freed(freed, full=not freed)
        return Freed(freed, full=False)

    def _evict_sample(
        self, tree: Tree, before: Usage, excess: int, ttl_s: float, *, alone: bool
    ) -> Evicted:
        """Evict from one sample: first what crashes left in its folders.

        `before` is the present sum of the ledger.
        """
        count = Count(before)
        wanted = sample_size(excess, before.mean_bytes)
        files = self._counted(tree, count)
        sample = list(islice(files, wanted))
        all_seen = len(sample) < wanted and not count.unread
        if alone and (all_seen or _is_doubtful(count)):
            with self._ledger.locked(tree.root, SWEEPING) as counting:
                if counting:
                    deque(files, maxlen=0)  # counts the rest of the store
                    self._correct(tree, count)
        cleared = count.cleared_bytes
        excess -= cleared
        while True:
            victims = choose_victims(
                sample,
                all_seen=all_seen,
                now_s=self._clock.expiry_now(),
                ttl_s=ttl_s,
                excess=excess,
            )
            # Leases are read only for the entries that would be evicted.
            leased = leased_digests(
                tree.leases, [candidate.digest for candidate in victims], time.time()
            )
            if not leased:
                freed, unremovable = self._remove(tree, victims)
                found = cleared > 0 or len(victims) > unremovable
                return Evicted(cleared + freed, found, all_seen, count.unread)
            sample = [candidate for candidate in sample if candidate.digest not in leased]

    def _counted(self, tree: Tree, count: Count) -> Iterator[EvictionCandidate]:
        """Yield entries in random order and count them; remove staging files that crashes left."""
        now = time.time()
        for found in tree.scan(count.unread, remove_empty=True):
            size = taken_bytes(found.size_bytes)
            if not found.staging:
                count.add(size)
                yield EvictionCandidate(found.digest, found.size_bytes, _used_s(found, now))
                continue
            age_s = abs(now - found.status.st_ctime)
            left = age_s > self.young_s and _is_left(found)
            if age_s <= CHARGE_S and not left:
                count.add_unsure(size)
                continue
            if not found.duplicate:
                count.add(size)
            if left and found.folder.remove(found.name) and not found.duplicate:
                self._ledger.release(tree.root, size)
                count.clear(size)

    def _correct(self, tree: Tree, count: Count) -> None:
        correction = count.correction(self._ledger.total(tree.root))
        if correction != Usage():
            # Another process may not have released yet what it removed.
            time.sleep(RELEASE_S)
            correction = correction.common(count.correction(self._ledger.total(tree.root)))
        if correction != Usage():
            try:
                self._ledger.add(tree.root, correction)
            except OSError as error:  # the next count corrects it
                if error.errno not in NO_ROOM:
                    raise

    def _remove(self, tree: Tree, victims: Sequence[EvictionCandidate]) -> tuple[int, int]:
        """Remove entries, except those used or leased since they were sampled.

        An entry is locked and renamed first, then checked again, and then removed. A process that
        leases an entry writes the lease first, and then checks that the entry exists. So either
        this process sees the lease and restores the name, or the other process sees that the entry
        is gone.

        Returns:
            Bytes freed, and the number of entries that this process is not able to remove.
        """
        with ExitStack() as locks:
            aside, unremovable = _set_all_aside(tree, victims, locks)
            digests = {candidate.digest for _, _, candidate in aside}
            try:
                leased = leased_digests(tree.leases, digests, time.time())
            except OSError:
                leased = digests
            freed = removed = 0
            for folder, name, candidate in aside:
                with suppress(OSError):
                    used = folder.stat(name).st_mtime > candidate.used_s
                    if used or candidate.digest in leased:
                        if name == candidate.digest:
                            continue
                        if folder.publish(name, candidate.digest):
                            folder.remove(name)
                            continue
                if folder.remove(name):
                    freed += taken_bytes(candidate.size_bytes)
                    removed += 1
                    self._ledger.release(tree.root, taken_bytes(candidate.size_bytes))
                    tree.remove_empty(candidate.digest)
        self._counts.add(evictions=removed)
        return freed, unremovable


def _set_all_aside(
    tree: Tree, victims: Sequence[EvictionCandidate], locks: ExitStack
) -> tuple[list[tuple[Folder, str, EvictionCandidate]], int]:
    """Lock and rename entries; return folders and new names, and the number that stay."""
    aside: list[tuple[Folder, str, EvictionCandidate]] = []
    unremovable = 0
    for candidate in victims:
        try:
            folder = tree.folder(candidate.digest)
            fd = folder.open(candidate.digest, READ)
            locks.callback(close_quietly, fd)
            lock(fd, shared=True)
            aside.append((folder, _set_aside(folder, candidate), candidate))
        except FileNotFoundError:  # another process has removed it
            continue
        except OSError:
            unremovable += 1
    return aside, unremovable


def _set_aside(folder: Folder, candidate: EvictionCandidate) -> str:
    """Rename an entry, and return its new name; its own name if there is no room for a new one."""
    name = staging_name(candidate.digest, candidate.size_bytes)
    try:
        folder.rename(candidate.digest, name)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return candidate.digest
    return name


def _is_left(found: Found) -> bool:
    """Return whether the process of a staging file has died: it would have the file locked."""
    with suppress(OSError):
        fd = found.folder.open(found.name, READ)
        try:
            return not is_locked(fd)
        finally:
            close_quietly(fd)
    return False


def _is_doubtful(count: Count) -> bool:
    """Return whether to count a whole store, because processes died in it."""
    left = max(count.cleared, count.cleared_bytes / max(1, count.before.mean_bytes))
    return COUNTED * left > random.random() * max(0, count.before.entries)  # noqa: S311


def _used_s(found: Found, now: float) -> float:
    """Return when an entry was last used, at most one minute from now.

    A later time comes from a clock that was ahead, and would keep the entry indefinitely.
    """
    if found.status.st_mtime <= now + 60:
        return found.status.st_mtime
    with suppress(OSError):
        os.utime(found.name, dir_fd=found.folder.fd, follow_symlinks=False)
    return now
