"""Eviction of entries from a shared directory, and removal of files that crashes left."""

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from ec_store.counts import Counts
from ec_store.disk.claims import leased_digests
from ec_store.disk.files import NO_ROOM, Folder, StoreClock
from ec_store.disk.ledger import Count, DeadWriters, Ledger, Usage
from ec_store.disk.lock import FileLock
from ec_store.disk.tree import (
    BLOCK_BYTES,
    EvictionCandidate,
    Found,
    Tree,
    choose_victims,
    sample_size,
    staging_name,
    taken_bytes,
)

STAGING_S = 3600.0
"""Age in seconds from which a staging file counts as left by a crash if this host cannot tell
whether its process lives: that of another host, or on a file system without locks."""

CHARGE_S = 10.0
"""Age in seconds up to which a staging file may not be charged yet, or may be published already."""

YOUNG_S = 0.25
"""Age in seconds up to which the process of a staging file counts as alive. Most writes take less;
without it, each eviction would test the locks of all processes that are writing."""

RENEW_S = 1.0
"""Seconds between two renewals of a lock while files are counted."""

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

Holds = Callable[[], bool]
"""Function that renews a lock, and returns False if it is lost."""


class Evictor:
    """Remover of entries, which also releases their usage in the ledger."""

    def __init__(
        self, clock: StoreClock, ledger: Ledger, counts: Counts, young_s: float = YOUNG_S
    ) -> None:
        """Create the object without access to a store; `young_s` is as `YOUNG_S`."""
        self._counts = counts
        self._young_s = young_s
        self._clock = clock
        self._ledger = ledger
        self._lock = FileLock("evicting.link")

    def free_space(self, tree: Tree, lacking: Lacking, ttl_s: float) -> Freed | None:
        """Evict the least recently used of a random sample, and its expired entries.

        The cost depends on the bytes to free, not on the number of entries in the store. If nothing
        is lacking, only the expired entries of one small sample are evicted.

        Returns:
            The result; None if another process is evicting.

        Raises:
            OSError: nothing was evicted, and entries could not be read.
        """
        try:
            token = self._lock.acquire(tree.root, lambda: self._clock.now(tree.root))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if lacking(self._ledger.total(tree.usage)) <= 0:
                return self.free_beside(tree, lacking, ttl_s)
            # There is no room for the lock, whatever the file system reports.
            first = self.free_beside(tree, lambda _: BLOCK_BYTES, ttl_s)
            if not first.bytes:
                return first
            return Freed(first.bytes + self.free_beside(tree, lacking, ttl_s).bytes, full=False)
        if token is None:
            return None
        try:
            return self._free_timed(
                tree, lacking, ttl_s, lambda: self._lock.still_held(tree.root, token)
            )
        finally:
            self._lock.release(tree.root, token)

    def free_beside(self, tree: Tree, lacking: Lacking, ttl_s: float) -> Freed:
        """Evict without the lock, for an entry that has to be written.

        A writer that frees only the size of its own entry needs no lock. All writers together free
        what they write, and if two remove the same entry, the second gets ENOENT.
        """
        return self._free_timed(tree, lacking, ttl_s, None)

    def sweep(self, tree: Tree, ttl_s: float, holds: Holds) -> None:
        """Read all entries: remove the expired ones, and correct the ledger.

        The sweep ends without a correction if `holds` returns False. Two processes that corrected
        the ledger at once would both apply the same correction.
        """
        now = self._clock.now(tree.root)
        count = Count(self._ledger.total(tree.usage))
        for kept in self._counted(tree, now, count, holds):
            expired = self._clock.expiry_now(tree.root) - kept.used_s > ttl_s
            if expired and (freed := self._remove(tree, [kept], now)[0]):
                count.remove(freed)
        if not count.ended_early and holds():
            self._correct(tree, count)

    def _free_timed(self, tree: Tree, lacking: Lacking, ttl_s: float, holds: Holds | None) -> Freed:
        """Evict, and observe the duration if room was needed."""
        started_s = time.monotonic()
        before = self._ledger.total(tree.usage)
        excess = lacking(before)
        if excess <= 0:
            return Freed(self._evict_sample(tree, before, 0, ttl_s, holds).bytes, full=False)
        try:
            return self._free(tree, excess, lacking, ttl_s, holds)
        finally:
            self._counts.observe("eviction_seconds", time.monotonic() - started_s)

    def _free(
        self,
        tree: Tree,
        excess: int,
        lacking: Lacking,
        ttl_s: float,
        holds: Holds | None,
    ) -> Freed:
        """Evict until `excess` bytes are freed, nothing is lacking, or no entry can be evicted.

        The sum of the ledger may be misread, so it is read again before each batch. The ledger is
        corrected only while the lock is held, as in `sweep`.
        """
        freed = fruitless = 0
        unread: list[OSError] = []
        while freed < excess and (holds is None or holds()):
            before = self._ledger.total(tree.usage)
            left = min(excess - freed, lacking(before))
            if left <= 0:
                break
            evicted = self._evict_sample(tree, before, left, ttl_s, holds)
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
        self, tree: Tree, before: Usage, excess: int, ttl_s: float, holds: Holds | None
    ) -> Evicted:
        """Evict from one sample: first what crashes left in its folders.

        `before` is the present sum of the ledger. If the lock is lost during a count of the whole
        store, no entry is evicted.
        """
        now = self._clock.now(tree.root)
        count = Count(before)
        wanted = sample_size(excess, before.mean_bytes)
        files = self._counted(tree, now, count, holds)
        sample = list(islice(files, wanted))
        all_seen = len(sample) < wanted and not count.unread
        if holds is not None and (all_seen or _is_doubtful(count)):
            deque(files, maxlen=0)  # counts the rest of the store
            if count.ended_early or not holds():
                return Evicted(count.cleared_bytes, count.cleared > 0, False, count.unread)
            self._correct(tree, count)
        cleared = count.cleared_bytes
        excess -= cleared
        while True:
            going = choose_victims(
                sample,
                all_seen=all_seen,
                now_s=self._clock.expiry_now(tree.root),
                ttl_s=ttl_s,
                excess=excess,
            )
            # Leases are read only for the entries that would be evicted.
            leased = leased_digests(tree.leases, [kept.digest for kept in going], now)
            if not leased:
                freed, kept_back = self._remove(tree, going, now)
                found = cleared > 0 or len(going) > kept_back
                return Evicted(cleared + freed, found, all_seen, count.unread)
            sample = [kept for kept in sample if kept.digest not in leased]

    def _counted(
        self, tree: Tree, now: float, count: Count, holds: Holds | None
    ) -> Iterator[EvictionCandidate]:
        """Yield entries in random order and count them; remove staging files that crashes left.

        The lock is renewed meanwhile: others would break it after `STALE_S`. If it is lost, the
        count ends early.
        """
        dead = DeadWriters(tree.usage)
        undoubted_now = self._clock.expiry_now(tree.root)
        renewed_s = time.monotonic()
        for found in tree.scan(count.unread, remove_empty=True):
            if holds is not None and time.monotonic() - renewed_s > RENEW_S:
                renewed_s = time.monotonic()
                if not holds():
                    count.ended_early = True
                    return
            size = taken_bytes(found.size_bytes)
            if not found.staging:
                count.add(size)
                yield EvictionCandidate(found.digest, found.size_bytes, _used_s(found, now))
                continue
            age_s = now - found.status.st_ctime
            left = undoubted_now - found.status.st_ctime > STAGING_S or (
                age_s > self._young_s and found.writer in dead
            )
            if age_s <= CHARGE_S and not left:
                count.add_unsure(size)
                continue
            if not found.duplicate:
                count.add(size)
            if left and found.folder.remove(found.name) and not found.duplicate:
                self._ledger.release(tree.usage, size)
                count.clear(size)

    def _correct(self, tree: Tree, count: Count) -> None:
        correction = count.correction(self._ledger.total(tree.usage))
        if correction != Usage():
            # Another process may not have released yet what it removed, or be merging a line.
            time.sleep(RELEASE_S)
            correction = correction.common(count.correction(self._ledger.total(tree.usage)))
        if correction != Usage():
            try:
                self._ledger.add(tree.usage, correction)
            except OSError as error:  # the next count corrects it
                if error.errno not in NO_ROOM:
                    raise

    def _remove(
        self, tree: Tree, going: Sequence[EvictionCandidate], now: float
    ) -> tuple[int, int]:
        """Remove entries, except those used or leased since they were sampled.

        An entry is renamed first, then checked again, and then removed. A process that leases an
        entry writes the lease first, and then checks that the entry exists. So either this process
        sees the lease and restores the name, or the other process sees that the entry is gone.

        Returns:
            Bytes freed, and the number of entries that this process is not able to remove.
        """
        writer = self._ledger.writer(tree.usage)
        aside: list[tuple[Folder, str, EvictionCandidate]] = []
        kept_back = 0
        for kept in going:
            try:
                folder = tree.folder(kept.digest)
                aside.append((folder, _set_aside(folder, kept, writer), kept))
            except FileNotFoundError:  # another process has removed it
                continue
            except OSError:
                kept_back += 1
        digests = {kept.digest for _, _, kept in aside}
        try:
            leased = leased_digests(tree.leases, digests, now)
        except OSError:
            leased = digests
        freed = removed = 0
        for folder, name, kept in aside:
            with suppress(OSError):
                used = folder.stat(name).st_mtime > kept.used_s
                if used or kept.digest in leased:
                    if name == kept.digest:
                        continue
                    if folder.publish(name, kept.digest):
                        folder.remove(name)
                        continue
            if folder.remove(name):
                freed += taken_bytes(kept.size_bytes)
                removed += 1
                self._ledger.release(tree.usage, taken_bytes(kept.size_bytes))
                tree.remove_empty(kept.digest)
        self._counts.add(evictions=removed)
        return freed, kept_back


def _set_aside(folder: Folder, kept: EvictionCandidate, writer: str) -> str:
    """Rename an entry, and return its new name; its own name if there is no room for a new one."""
    name = staging_name(kept.digest, kept.size_bytes, writer)
    try:
        folder.rename(kept.digest, name)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return kept.digest
    return name


def _is_doubtful(count: Count) -> bool:
    """Return whether to count a whole store, because processes died in it."""
    left = max(count.cleared, count.cleared_bytes / max(1, count.before.mean_bytes))
    return COUNTED * left > random.random() * max(0, count.before.entries)  # noqa: S311


def _used_s(found: Found, now: float) -> float:
    """Return when an entry was last used, at most one minute from now.

    A later time comes from a store's clock that was ahead, and would keep the entry indefinitely.
    """
    if found.status.st_mtime <= now + 60:
        return found.status.st_mtime
    with suppress(OSError):
        os.utime(found.name, dir_fd=found.folder.fd, follow_symlinks=False)
    return now
