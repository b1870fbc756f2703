"""Eviction of entries from a shared directory, and removal of files that crashes left."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ec_store.counts import Counts
from ec_store.disk.eviction_policy import (
    EvictionCandidate,
    choose_victims,
    sample_size,
    taken_bytes,
)
from ec_store.disk.files import NO_ROOM, READ, Folder, close_quietly
from ec_store.disk.leases import leased_digests
from ec_store.disk.ledger import Ledger, Usage
from ec_store.disk.lock import is_locked, lock
from ec_store.disk.tree import Found, Tree, release_name, staging_name

YOUNG_S = 0.25
"""Age in seconds up to which the process of a staging file counts as alive: it may not have locked
the file yet. Most writes take less, so an eviction tests few locks."""

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
    """Remover of entries, which also releases their usage in the ledger.

    Several processes may evict at once: each reads the ledger again before each batch, and of two
    that remove the same entry, the second gets ENOENT.
    """

    def __init__(self, ledger: Ledger, counts: Counts) -> None:
        self.young_s = YOUNG_S
        self._counts = counts
        self._ledger = ledger

    def free_space(self, tree: Tree, lacking: Lacking, ttl_s: float) -> Freed:
        """Evict the least recently used of a random sample, and its expired entries.

        The cost depends on the bytes to free, not on the number of entries in the store. If nothing
        is lacking, only the expired entries of one small sample are evicted.

        Raises:
            OSError: nothing was evicted, and entries could not be read.
        """
        started_s = time.monotonic()
        before = self._ledger.total(tree.root)
        excess = lacking(before)
        if excess <= 0:
            return Freed(self._evict_sample(tree, before, 0, ttl_s).bytes, full=False)
        try:
            return self._free(tree, excess, lacking, ttl_s)
        finally:
            self._counts.observe("eviction_seconds", time.monotonic() - started_s)

    def sweep(self, tree: Tree, ttl_s: float) -> None:
        """Read all entries: remove the expired ones and leftovers, and correct the ledger.

        The caller holds the lock of the sweep: two processes that corrected the ledger at once
        would both apply the same correction.
        """
        before, now = self._ledger.total(tree.root), time.time()
        expired: list[EvictionCandidate] = []
        left: list[Found] = []
        unread: list[OSError] = []
        size_bytes = entries = 0
        is_written = False
        for found in tree.scan(unread, remove_empty=True):
            is_left = found.staging and self._is_left(found, now)
            if found.is_charged or not is_left:
                size_bytes += _charged_bytes(found)
                entries += 1
            if is_left:
                left.append(found)
            elif found.staging:
                is_written = True
            else:
                candidate = _candidate(found, now)
                if now - candidate.used_s > ttl_s:
                    expired.append(candidate)
        if not unread:
            correct = self._release_excess if is_written else self._correct
            correct(tree, before, Usage(size_bytes, entries))
        for found in left:
            self._clear(tree, found)
        for candidate in expired:
            self._remove(tree, [candidate])

    def _free(self, tree: Tree, excess: int, lacking: Lacking, ttl_s: float) -> Freed:
        """Evict until `excess` bytes are freed, nothing is lacking, or no entry can be evicted."""
        freed = fruitless = 0
        unread: list[OSError] = []
        while freed < excess:
            before = self._ledger.total(tree.root)
            left = min(excess - freed, lacking(before))
            if left <= 0:
                break
            evicted = self._evict_sample(tree, before, left, ttl_s)
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

    def _evict_sample(self, tree: Tree, before: Usage, excess: int, ttl_s: float) -> Evicted:
        """Evict from one sample: first what crashes left in its folders.

        `before` is the present sum of the ledger.
        """
        wanted, now = sample_size(excess, before.mean_bytes), time.time()
        sample: list[EvictionCandidate] = []
        unread: list[OSError] = []
        cleared = counted = number = 0
        for found in tree.scan(unread, remove_empty=True):
            is_left = found.staging and self._is_left(found, now)
            if found.is_charged or not is_left:
                counted += _charged_bytes(found)
                number += 1
            if is_left:
                cleared += self._clear(tree, found)
            elif not found.staging:
                sample.append(_candidate(found, now))
                if len(sample) == wanted:
                    break
        all_seen = len(sample) < wanted and not unread
        if all_seen:
            with self._ledger.sweeping(tree.root) as held:
                if held:
                    self._release_excess(tree, before, Usage(counted, number))
        while True:
            victims = choose_victims(
                sample, all_seen=all_seen, now_s=now, ttl_s=ttl_s, excess=excess - cleared
            )
            # Leases are read only for the entries that would be evicted.
            leased = leased_digests(
                tree.leases, [candidate.digest for candidate in victims], time.time()
            )
            if not leased:
                freed, unremovable = self._remove(tree, victims)
                found_any = cleared > 0 or len(victims) > unremovable
                return Evicted(cleared + freed, found_any, all_seen, unread)
            sample = [candidate for candidate in sample if candidate.digest not in leased]

    def _is_left(self, found: Found, now: float) -> bool:
        """Return whether the process of a staging file has died: it would have the file locked."""
        if abs(now - found.status.st_ctime) <= self.young_s:
            return False
        with suppress(OSError):
            fd = found.folder.open(found.name, READ)
            try:
                return not is_locked(fd)
            finally:
                close_quietly(fd)
        return False

    def _clear(self, tree: Tree, found: Found) -> int:
        """Remove a staging file that a crash left, and return the bytes that it frees."""
        published = found.status.st_nlink > 1  # the charge is that of the entry
        if not found.folder.remove(found.name) or published or not found.is_charged:
            return 0
        size_bytes = taken_bytes(found.size_bytes)
        self._ledger.release(tree.root, size_bytes)
        return size_bytes

    def _release_excess(self, tree: Tree, before: Usage, counted: Usage) -> None:
        """Release what the ledger has beyond all files, and beyond what came since `before`.

        The caller holds the lock of the sweep. Others may write and evict meanwhile.
        """
        for waits in (False, True):
            if waits:  # another process may not have released yet what it removed
                time.sleep(RELEASE_S)
            now = self._ledger.total(tree.root)
            size_bytes = now.bytes - counted.bytes - (now.charged_bytes - before.charged_bytes)
            entries = now.entries - counted.entries - (now.charged - before.charged)
            if size_bytes <= 0 or entries < 0:
                return
        with suppress(OSError):  # the next count corrects it
            self._ledger.add(tree.root, Usage(released_bytes=size_bytes, released=entries))

    def _correct(self, tree: Tree, before: Usage, counted: Usage) -> None:
        """Correct the ledger by a count of all files, unless others have changed it meanwhile."""
        size_bytes, entries = counted.bytes - before.bytes, counted.entries - before.entries
        if not size_bytes and not entries:
            return
        # Another process may not have released yet what it removed.
        time.sleep(RELEASE_S)
        if self._ledger.total(tree.root) != before:
            self._release_excess(tree, before, counted)
        else:
            more = Usage(max(0, size_bytes), max(0, entries))
            with suppress(OSError):  # the next sweep corrects it
                self._ledger.add(
                    tree.root, more + Usage(0, 0, max(0, -size_bytes), max(0, -entries))
                )

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
                        second = release_name(folder, name, candidate.digest)
                        if folder.publish(second, candidate.digest):
                            folder.remove(second)
                            continue
                        name = second  # noqa: PLW2901 - another process has put the entry again
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


def _charged_bytes(found: Found) -> int:
    """Return what the ledger has for a file. The name has no size while it is published."""
    return taken_bytes(found.size_bytes or found.status.st_size)


def _candidate(found: Found, now: float) -> EvictionCandidate:
    """Return an entry with its last use, at most one minute from now.

    A later time comes from a clock that was ahead, and would keep the entry indefinitely.
    """
    used_s = found.status.st_mtime
    if used_s > now + 60:
        used_s = now
        with suppress(OSError):
            os.utime(found.name, dir_fd=found.folder.fd, follow_symlinks=False)
    return EvictionCandidate(found.digest, found.size_bytes, used_s)
