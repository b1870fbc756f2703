"""Which entries go. Pure: sizes and ages in, names out."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

LOW_WATER = 0.9
"""How full an eviction leaves a store, so that not every put evicts."""

HIGH_WATER = 0.95
"""How full a store is when a writer evicts although its entry still fits."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An entry as eviction sees it.

    Attributes:
        digest: its key's digest.
        size_bytes: what it takes.
        used_s: when it was last used, by the store's clock.
    """

    digest: str
    size_bytes: int
    used_s: float


def expired(kept: Iterable[Kept], now_s: float, ttl_s: float) -> list[Kept]:
    """Those that were not used for longer than `ttl_s`."""
    return [entry for entry in kept if now_s - entry.used_s > ttl_s]


def excess_bytes(used_bytes: int, max_bytes: int) -> int:
    """How much must go from a store that takes `used_bytes`: nothing below the high-water mark."""
    if used_bytes <= max_bytes * HIGH_WATER:
        return 0
    return used_bytes - int(max_bytes * LOW_WATER)


def victims(
    kept: Iterable[Kept], *, now_s: float, ttl_s: float, leased: Collection[str], excess: int
) -> list[Kept]:
    """Those that go: the expired, then the least recently used until `excess` bytes are free.

    What is leased stays, even if that frees too little.
    """
    free = sorted(
        (entry for entry in kept if entry.digest not in leased), key=lambda entry: entry.used_s
    )
    going = expired(free, now_s, ttl_s)
    left = excess - sum(entry.size_bytes for entry in going)
    for entry in free[len(going) :]:
        if left <= 0:
            break
        going.append(entry)
        left -= entry.size_bytes
    return going
