"""Rendezvous hashing with bounded loads: which seats are near to a key, and which have room.

A seat takes requests: an instance, or one of its data-parallel ranks. Proxies with the same seats
agree without communication. When a seat joins or leaves, only its own keys move. When shares
change, the minimum of keys moves (weighted rendezvous hashing: Schindelhauer and Schomaker,
Weighted Distributed Hash Tables, 2005).
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

from xxhash import xxh3_64_intdigest

LOAD_FACTOR = 1.25
"""Factor by which a seat's load may exceed its share before its keys move to others (Mirrokni
et al., Consistent Hashing with Bounded Loads, 2016)."""

OUTLIER = 2.0
"""Factor above the usual load up to which a report counts in full. A wrong report, or one of a
hanging instance, must not raise the bound for all others without limit."""

_value, _share, _pressure = attrgetter("value"), attrgetter("share"), attrgetter("pressure")


class LoadedSeat(Protocol):
    """An instance or a rank with its load (`epd.routing.load.Load`)."""

    @property
    def value(self) -> int: ...

    @property
    def under_way(self) -> int: ...

    @property
    def share(self) -> float: ...

    @property
    def pressure(self) -> float: ...

    @property
    def seed(self) -> int: ...


def distances(seats: Sequence[LoadedSeat], key: bytes) -> list[float]:
    """Return the distances from a key: exponentially distributed, with the shares as rates."""
    log, digest = math.log, xxh3_64_intdigest
    return [-log((digest(key, seat.seed) + 1) * 2.0**-64) / seat.share for seat in seats]


def upper_bound(seats: Sequence[LoadedSeat]) -> Callable[[LoadedSeat], int]:
    """Return the maximum load of a seat before its keys move. At least one is always below it.

    The part of a load that an instance only reported is capped: at `OUTLIER` times the lower
    median, plus one request. Local requests always count in full. The cap is above the
    lowest load, which therefore stays below the maximum.
    """
    shares, pressures = sum(map(_share, seats)), sorted(map(_pressure, seats))
    usual = OUTLIER * (pressures[(len(seats) - 1) // 2] + len(seats) / shares)
    if pressures[-1] <= usual:
        requests: float = sum(map(_value, seats))
    else:
        requests = sum(min(seat.value, max(seat.under_way, usual * seat.share)) for seat in seats)
    each = LOAD_FACTOR * (requests + 1) / shares
    return lambda seat: math.ceil(each * seat.share)
