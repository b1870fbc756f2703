"""Policy of eviction: how many bytes to free, and which entries to evict. No I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

BLOCK_BYTES = 4096
"""Allocation unit of file systems in bytes: a file takes whole blocks, at least one."""

HIGH_WATER = 0.95
"""Share of the quota down to which `evict` empties a store, so that writers find room for a
while."""

RESERVE_SHARE = 0.05
RESERVE_BYTES = 2**30
RESERVE_FILES = 256

SAMPLED = 8
"""Entries sampled for each entry evicted. The oldest of eight is in the older half of all entries
with a probability of 255/256; Redis samples five."""

BATCH = 16
"""Upper bound of the entries evicted at a time."""


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """Entry as the eviction policy sees it: the size of its file, and its last use.

    `used_s` is by the store's clock.
    """

    digest: str
    size_bytes: int
    used_s: float


Candidate = TypeVar("Candidate", bound=EvictionCandidate)


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Size and free space of a file system at one moment.

    Attributes:
        size_bytes: size of the file system; 0 if the file system does not report it.
        free_bytes: bytes that a user may still write.
        files: upper bound of the files (inodes); 0 if there is none.
        free_files: files that a user may still create.
    """

    size_bytes: int
    free_bytes: int
    files: int = 0
    free_files: int = 0

    @property
    def reserve_bytes(self) -> int:
        """Return how many bytes a store leaves free.

        Shared memory of other processes may be allocated at its first use. If nothing is free then,
        those processes end with SIGBUS.
        """
        return min(int(self.size_bytes * RESERVE_SHARE), RESERVE_BYTES)

    def quota_bytes(self, max_bytes: int, share: float) -> int:
        """Return the quota: `max_bytes`, or `share` of the file system if that is less."""
        return min(max_bytes, int(self.size_bytes * share)) if self.size_bytes else max_bytes

    def lacking_bytes(self, coming_bytes: int) -> int:
        """Return how many bytes to free so that `coming_bytes` more leave the reserve free."""
        if not self.size_bytes:
            return 0
        return max(0, self.reserve_bytes + coming_bytes - self.free_bytes)

    @property
    def lacking_files(self) -> int:
        """Return how many files to remove so that others can create some."""
        reserve = min(int(self.files * RESERVE_SHARE), RESERVE_FILES)
        return max(0, reserve - self.free_files)


def taken_bytes(size_bytes: int) -> int:
    """Return how many bytes a file of `size_bytes` takes on disk."""
    return max(1, math.ceil(size_bytes / BLOCK_BYTES)) * BLOCK_BYTES


def excess_bytes(used_bytes: int, quota_bytes: int) -> int:
    """Return how many bytes to free ahead of writers: the usage above the high-water mark."""
    return max(0, used_bytes - int(quota_bytes * HIGH_WATER))


def sample_size(excess_bytes: int, mean_bytes: float) -> int:
    """Return how many entries of `mean_bytes` to sample in order to free `excess_bytes`."""
    return SAMPLED * min(BATCH, max(1, math.ceil(excess_bytes / max(mean_bytes, BLOCK_BYTES))))


def choose_victims(
    sample: Sequence[Candidate], *, all_seen: bool, now_s: float, ttl_s: float, excess: int
) -> list[Candidate]:
    """Return the entries of a sample to evict: the expired, then the least recently used.

    These are all expired entries of the sample, and others until `excess` bytes are freed, up to
    `BATCH` entries. Unless the sample is the whole store (`all_seen`), at most one entry in
    `SAMPLED` is evicted, the oldest ones: the next ones may be recent compared with the rest of
    the store.
    """
    free = sorted(sample, key=lambda entry: entry.used_s)
    victims = [entry for entry in free if now_s - entry.used_s > ttl_s]
    most = BATCH if all_seen else math.ceil(len(free) / SAMPLED)
    left = excess - sum(taken_bytes(entry.size_bytes) for entry in victims)
    for entry in free[len(victims) : most]:
        if left <= 0:
            break
        victims.append(entry)
        left -= taken_bytes(entry.size_bytes)
    return victims
