"""What an eviction has to free, and which entries go. Pure: sizes and ages in, names out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_BYTES = 4096
"""What file systems allocate: a file takes whole blocks, and at least one."""

HIGH_WATER = 0.95
"""How full `evict` leaves a store, so that writers find room for a while."""

RESERVE_SHARE = 0.05
RESERVE_BYTES = 2**30

SAMPLED = 8
"""Entries that are looked at for each one that goes. The oldest of eight is among the older half of
all with a probability of 255/256; Redis looks at five."""

BATCH = 16
"""Most entries that go at a time."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An entry as eviction sees it.

    Attributes:
        digest: its key's digest.
        size_bytes: the size of its file.
        used_s: when it was last used, by the store's clock.
    """

    digest: str
    size_bytes: int
    used_s: float


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A file system at the moment; one that does not tell its size has `size_bytes` of 0.

    Attributes:
        size_bytes: its size.
        free_bytes: what a user may still write.
    """

    size_bytes: int
    free_bytes: int

    @property
    def reserve_bytes(self) -> int:
        """What a store leaves free.

        Shared memory of other processes may be allocated when it is touched: where nothing is free
        then, they end with SIGBUS.
        """
        return min(int(self.size_bytes * RESERVE_SHARE), RESERVE_BYTES)

    def quota_bytes(self, max_bytes: int, share: float) -> int:
        """What a store may take: `max_bytes`, or `share` of the file system if that is less."""
        return min(max_bytes, int(self.size_bytes * share)) if self.size_bytes else max_bytes

    def lacking_bytes(self, coming_bytes: int) -> int:
        """What has to be freed so that the reserve is still there after `coming_bytes` more."""
        if not self.size_bytes:
            return 0
        return max(0, self.reserve_bytes + coming_bytes - self.free_bytes)


def taken_bytes(size_bytes: int) -> int:
    """What a file of `size_bytes` takes."""
    return max(1, math.ceil(size_bytes / BLOCK_BYTES)) * BLOCK_BYTES


def excess_bytes(used_bytes: int, quota_bytes: int) -> int:
    """What has to go ahead of writers: what is above the high-water mark."""
    return max(0, used_bytes - int(quota_bytes * HIGH_WATER))


def sample_size(excess_bytes: int, mean_bytes: float) -> int:
    """How many entries to look at, where entries of `mean_bytes` are to free `excess_bytes`."""
    return SAMPLED * min(BATCH, max(1, math.ceil(excess_bytes / max(mean_bytes, BLOCK_BYTES))))


def victims(
    sample: Sequence[Kept],
    *,
    all_seen: bool,
    now_s: float,
    ttl_s: float,
    excess: int,
) -> list[Kept]:
    """Which entries of a sample go: the expired, then the least recently used.

    Args:
        sample: entries that may go.
        all_seen: whether the store has no others.
        now_s: the time, by the store's clock.
        ttl_s: seconds after which an entry that was not used is expired.
        excess: bytes to free.

    Returns:
        All expired entries of the sample, and more until `excess` is freed. Of a sample those are
        the oldest of each `SAMPLED` at most: the next ones may be young as entries of the store go.
    """
    free = sorted(sample, key=lambda entry: entry.used_s)
    going = [entry for entry in free if now_s - entry.used_s > ttl_s]
    most = len(free) if all_seen else math.ceil(len(free) / SAMPLED)
    left = excess - sum(taken_bytes(entry.size_bytes) for entry in going)
    for entry in free[len(going) : most]:
        if left <= 0:
            break
        going.append(entry)
        left -= taken_bytes(entry.size_bytes)
    return going
