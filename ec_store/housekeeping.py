"""Keeps a shared directory within its quota, and free of what crashes leave."""

import os
import random
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from ec_store.claims import Claims
from ec_store.errors import StoreUnavailable
from ec_store.eviction import HIGH_WATER, Kept, excess_bytes, victims
from ec_store.files import Folder, StoreClock, regular
from ec_store.leases import Leases
from ec_store.ledger import Ledger
from ec_store.lock import EvictionLock
from ec_store.tree import Found, Tree, staging_name

STAGING_S = 3600.0
"""A staging file that was not written to for so long was left by a crash."""

QUARANTINE_S = 86400.0
QUARANTINED = 64
SWEEP_EVERY_S = 900.0
WAIT_S = 10.0
"""How long a writer waits for room that another process is making."""

FRUITLESS_S = 1.0
"""How long a store that nothing can be removed from is taken for full without looking again."""

_BATCH = 64


class Housekeeping:
    """Evicts and sweeps. Any process may, one does at a time, and none has to."""

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self.clock = StoreClock()
        self.ledger = Ledger()
        self.leases = Leases()
        self.claims = Claims()
        self.evictions = 0
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._lock = EvictionLock()
        self._counting = threading.Lock()
        self._fruitless_until_s = float("-inf")
        self._look_s = float("-inf")

    def make_room(self, tree: Tree) -> None:
        """Bring the usage, with what is charged already, under the quota.

        Raises:
            StoreUnavailable: nothing more can be removed, or somebody takes long to.
        """
        deadline = time.monotonic() + WAIT_S
        while (used := self.ledger.total(tree.usage).bytes) > self._max_bytes:
            if time.monotonic() < self._fruitless_until_s:
                raise StoreUnavailable("the store is full of what cannot be evicted")
            if self.evict(tree) is None:
                if time.monotonic() > deadline:
                    raise StoreUnavailable("the store is full and still being evicted from")
                time.sleep(random.uniform(0.001, 0.01))  # noqa: S311
        if self._due(tree) or used > self._max_bytes * HIGH_WATER:
            self._evict_quietly(tree)

    def evict(self, tree: Tree, free_bytes: int = 0) -> int | None:
        """Evict and sweep.

        Args:
            tree: the store.
            free_bytes: how much to free even where the quota is kept: the disk is full.

        Returns:
            How many entries were removed; None where somebody else is at it.
        """
        if not self._lock.acquire(tree.root, lambda: self.clock.now(tree.root)):
            return None
        try:
            removed = self._evict(tree, free_bytes)
        finally:
            self._lock.release(tree.root)
        with self._counting:
            self.evictions += removed
        return removed

    def _evict_quietly(self, tree: Tree) -> None:
        if time.monotonic() >= self._fruitless_until_s:
            with suppress(OSError):
                self.evict(tree)

    def _due(self, tree: Tree) -> bool:
        """Whether the last sweep, by whomever, is long ago."""
        every_s = min(SWEEP_EVERY_S, self._ttl_s / 4)
        if time.monotonic() < self._look_s:
            return False
        self._look_s = time.monotonic() + every_s / 4
        try:
            swept_s = tree.root.stat("swept").st_mtime
        except OSError:
            return True
        return self.clock.now(tree.root) - swept_s > every_s

    def _evict(self, tree: Tree, free_bytes: int) -> int:
        now = self.clock.now(tree.root)
        kept = self._count(tree, now)
        if kept is None:
            return 0
        used = self.ledger.total(tree.usage).bytes
        excess = max(free_bytes, excess_bytes(used, self._max_bytes))
        leased = self.leases.live(tree.leases, now)
        going = victims(kept, now_s=now, ttl_s=self._ttl_s, leased=leased, excess=excess)
        removed = 0
        for begin in range(0, len(going), _BATCH):
            if not self._lock.held(tree.root):
                break
            removed += self._remove(tree, going[begin : begin + _BATCH], now)
        if excess and not removed:
            self._fruitless_until_s = time.monotonic() + FRUITLESS_S
        self._sweep(tree, now)
        return removed

    def _count(self, tree: Tree, now: float) -> list[Kept] | None:
        """All entries, and correct the ledger by them; None where the lock was lost meanwhile."""
        before = self.ledger.total(tree.usage)
        kept: list[Kept] = []
        size, count = 0, 0
        beat = time.monotonic()
        unread: list[OSError] = []
        for found in tree.scan(unread):
            if time.monotonic() - beat > 1:
                beat = time.monotonic()
                if not self._lock.held(tree.root):
                    return None
            if found.staging and now - found.modified_s > STAGING_S:
                found.folder.remove(found.name)
                continue
            size += found.size_bytes
            count += 1
            if not found.staging:
                kept.append(Kept(found.digest, found.size_bytes, _used_s(found, now)))
        after = self.ledger.total(tree.usage)
        # Whatever was charged before and is not released yet has been seen, so this corrects what
        # crashes left in the sum and never takes off what others are just writing.
        missing = size - (before.charged_bytes - after.released_bytes)
        missing_count = count - (before.charged - after.released)
        if missing > 0 or missing_count > 0:
            self.ledger.charge(tree.usage, max(0, missing), max(0, missing_count))
        # What could not be read is there, and takes room.
        if not unread and (missing < 0 or missing_count < 0):
            self.ledger.release(tree.usage, max(0, -missing), max(0, -missing_count))
        return kept

    def _remove(self, tree: Tree, going: Sequence[Kept], now: float) -> int:
        """Remove entries, but for those that were leased in the last moment.

        They are renamed, then the leases are read again, then they are removed. Who leases writes
        the lease, then looks whether the entry is there. So either the lease is seen here and the
        entry gets its name back, or the entry is seen to be gone there.
        """
        aside: list[tuple[Folder, str, Kept]] = []
        for kept in going:
            with suppress(OSError):
                folder = tree.folder(kept.digest)
                name = staging_name(kept.digest, kept.size_bytes)
                folder.rename(kept.digest, name)
                aside.append((folder, name, kept))
        leased = self.leases.live(tree.leases, now)
        removed = 0
        for folder, name, kept in aside:
            if kept.digest in leased:
                with suppress(OSError):
                    if folder.publish(name, kept.digest):
                        folder.remove(name)
                        continue
            if folder.remove(name):
                self.ledger.release(tree.usage, kept.size_bytes)
                removed += 1
        return removed

    def _sweep(self, tree: Tree, now: float) -> None:
        """Remove what is neither entry nor needed."""
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
        with suppress(OSError):
            tree.root.replace("swept", b"")

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
        full = len(sizes) >= QUARANTINED or sum(sizes) + status.st_size > self._max_bytes // 16
        if full and regular(status):
            gone = folder.remove(digest)
        else:
            folder.rename(digest, f"{digest}.{secrets.token_hex(8)}", tree.quarantine)
            gone = True
        if gone and regular(status):
            self.ledger.release(tree.usage, status.st_size)
        return gone


def _used_s(found: Found, now: float) -> float:
    """When an entry was last used.

    A time in the future, from when the store's clock was ahead, would keep it for ever.
    """
    if found.modified_s > now + 60:
        with suppress(OSError):
            os.utime(found.name, dir_fd=found.folder.fd, follow_symlinks=False)
    return min(found.modified_s, now)
