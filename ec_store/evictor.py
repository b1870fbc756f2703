"""Removes entries of a shared directory, and what crashes left among them."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from ec_store.counts import Counts
from ec_store.eviction import Kept, sample_size, taken_bytes, victims
from ec_store.files import Folder, StoreClock
from ec_store.leases import Leases
from ec_store.ledger import Count, Ledger, Usage
from ec_store.lock import FileLock
from ec_store.tree import Found, Tree, staging_name

STAGING_S = 3600.0
"""A staging file that was not written to for so long was left by a crash."""

SAMPLES = 4
"""Samples in a row of which nothing goes, until nothing is taken to be evictable."""


class Freed(NamedTuple):
    """What an eviction did.

    Attributes:
        bytes: that were freed.
        full: whether nothing was found that may be evicted. Not where other processes removed it
            first, or used it meanwhile.
    """

    bytes: int
    full: bool


class Evictor:
    """Removes entries, whose usage it releases.

    Attributes:
        evictions: how many were removed.
    """

    def __init__(self, clock: StoreClock, ledger: Ledger, leases: Leases, counts: Counts) -> None:
        self.evictions = 0
        self._counts = counts
        self._clock = clock
        self._ledger = ledger
        self._leases = leases
        self._lock = FileLock("evicting")
        self.renew_locks()

    def renew_locks(self) -> None:
        """Begin with a free lock, in a child of `fork`."""
        self._counting = threading.Lock()

    def free(self, tree: Tree, excess_bytes: int, ttl_s: float) -> Freed | None:
        """Evict the least recently used of random entries, and the expired ones among them.

        What this costs depends on what has to be freed, and not on how many entries there are.

        Args:
            tree: the store.
            excess_bytes: what has to be freed; 0 for the expired ones of one small sample.
            ttl_s: seconds after which an entry that was not used is expired.

        Returns:
            What was freed; None where another process is evicting.
        """
        if not self._lock.acquire(tree.root, lambda: self._clock.now(tree.root)):
            return None
        try:
            return self._free_timed(tree, excess_bytes, ttl_s, lambda: self._lock.held(tree.root))
        finally:
            self._lock.release(tree.root)

    def free_beside(self, tree: Tree, excess_bytes: int, ttl_s: float) -> Freed:
        """Evict while another process does, for an entry that has to be written.

        A writer that frees no more than its own entry takes needs no lock: the writers together
        free what they bring, and of two that remove one entry, the second gets ENOENT.
        """
        return self._free_timed(tree, excess_bytes, ttl_s, None)

    def sweep(self, tree: Tree, ttl_s: float, goes_on: Callable[[], bool]) -> None:
        """Look at all entries: remove the expired ones, and correct the ledger.

        Args:
            tree: the store.
            ttl_s: seconds after which an entry that was not used is expired.
            goes_on: asked about once a second, and before the ledger is corrected; the sweep ends
                where it says no. Two sweeps that correct the ledger at once would both count the
                same error.
        """
        now = self._clock.now(tree.root)
        count, unread = Count(self._ledger.total(tree.usage)), list[OSError]()
        asked_s = time.monotonic()
        for kept in self._counted(tree, now, count, unread):
            if time.monotonic() - asked_s > 1:
                asked_s = time.monotonic()
                if not goes_on():
                    return
            if now - kept.used_s > ttl_s and (freed := self._remove(tree, [kept], now)[0]):
                count.remove(freed)
        if goes_on():
            self._correct(tree, count, unread)

    def _free_timed(
        self, tree: Tree, excess: int, ttl_s: float, holds: Callable[[], bool] | None
    ) -> Freed:
        """As `_free`; the time is observed where room is needed."""
        started_s = time.monotonic()
        freed = self._free(tree, excess, ttl_s, holds)
        if excess > 0:
            self._counts.observe("eviction_seconds", time.monotonic() - started_s)
        return freed

    def _free(
        self, tree: Tree, excess: int, ttl_s: float, holds: Callable[[], bool] | None
    ) -> Freed:
        """Evict until `excess` bytes are freed, or nothing goes.

        Args:
            tree: the store.
            excess: bytes to free.
            ttl_s: as in `free`.
            holds: whether the lock is still held; None without the lock, where the ledger is not
                corrected: two processes that correct it at once would both count the same error.
        """
        freed = fruitless = 0
        while holds is None or holds():
            gone, found, all_seen = self._free_some(
                tree, excess - freed, ttl_s, corrects=holds is not None
            )
            freed += gone
            fruitless = 0 if found else fruitless + 1
            if fruitless == SAMPLES or (all_seen and not found):
                return Freed(freed, full=not freed)
            others_removed_them = found and not gone  # the caller reads the ledger again
            if freed >= excess or others_removed_them:
                break
        return Freed(freed, full=False)

    def _free_some(
        self, tree: Tree, excess: int, ttl_s: float, *, corrects: bool
    ) -> tuple[int, bool, bool]:
        """Evict from one sample.

        Returns:
            How many bytes were freed, whether there was anything to evict, and whether the sample
            was all there is.
        """
        now = self._clock.now(tree.root)
        count, unread = Count(self._ledger.total(tree.usage)), list[OSError]()
        wanted = sample_size(excess, count.before.bytes / max(1, count.before.entries))
        sample = list(islice(self._counted(tree, now, count, unread), wanted))
        all_seen = len(sample) < wanted
        if all_seen and corrects:
            self._correct(tree, count, unread)
        while True:
            going = victims(sample, all_seen=all_seen, now_s=now, ttl_s=ttl_s, excess=excess)
            # Asked only of entries that would go.
            leased = self._leases.leased(tree.leases, [kept.digest for kept in going], now)
            if not leased:
                freed, kept_back = self._remove(tree, going, now)
                return freed, len(going) > kept_back, all_seen
            sample = [kept for kept in sample if kept.digest not in leased]

    def _counted(
        self, tree: Tree, now: float, count: Count, unread: list[OSError]
    ) -> Iterator[Kept]:
        """Entries in a random order, counted; staging files that crashes left are removed."""
        for found in tree.scan(unread, remove_empty=True):
            size = taken_bytes(found.size_bytes)
            published = found.staging and found.links > 1  # its other name is counted
            if not published:
                count.add(size)
            if not found.staging:
                yield Kept(found.digest, found.size_bytes, _used_s(found, now))
                continue
            stale = now - found.changed_s > STAGING_S
            if stale and found.folder.remove(found.name) and not published:
                self._ledger.release(tree.usage, size)
                count.remove(size)

    def _correct(self, tree: Tree, count: Count, unread: Sequence[OSError]) -> None:
        """Correct the ledger by a count of all files."""
        correction = count.correction(self._ledger.total(tree.usage))
        if unread:  # it is there, and takes room
            correction = Usage(correction.charged_bytes, correction.charged)
        if correction != Usage():
            self._ledger.add(tree.usage, correction)

    def _remove(self, tree: Tree, going: Sequence[Kept], now: float) -> tuple[int, int]:
        """Remove entries, but for those that were used or leased since they were looked at.

        They are renamed, then looked at again, then removed. A process that leases an entry writes
        the lease, then looks whether the entry is there. So either the lease is seen here and the
        entry gets its name back, or the entry is seen to be gone there.

        Returns:
            How many bytes were freed, and how many entries cannot be removed by this process.
        """
        aside: list[tuple[Folder, str, Kept]] = []
        kept_back = 0
        for kept in going:
            try:
                folder = tree.folder(kept.digest)
                name = staging_name(kept.digest, kept.size_bytes)
                folder.rename(kept.digest, name)
                aside.append((folder, name, kept))
            except FileNotFoundError:  # another process has removed it
                continue
            except OSError:
                kept_back += 1
        digests = {kept.digest for _, _, kept in aside}
        try:
            leased = self._leases.leased(tree.leases, digests, now)
        except OSError:
            leased = digests
        freed = removed = 0
        for folder, name, kept in aside:
            with suppress(OSError):
                used = folder.stat(name).st_mtime > kept.used_s
                if (used or kept.digest in leased) and folder.publish(name, kept.digest):
                    folder.remove(name)
                    continue
            if folder.remove(name):
                tree.remove_empty(kept.digest)
                freed += taken_bytes(kept.size_bytes)
                removed += 1
                with suppress(OSError):  # the sum is too high then, until the next sweep
                    self._ledger.release(tree.usage, taken_bytes(kept.size_bytes))
        with self._counting:
            self.evictions += removed
        return freed, kept_back


def _used_s(found: Found, now: float) -> float:
    """When an entry was last used.

    A time in the future, from when the store's clock was ahead, would keep it for ever.
    """
    if found.modified_s <= now + 60:
        return found.modified_s
    with suppress(OSError):
        os.utime(found.name, dir_fd=found.folder.fd, follow_symlinks=False)
    return now
