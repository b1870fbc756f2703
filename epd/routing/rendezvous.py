"""Rendezvous hashing with bounded loads: which engines are near to a key, and which have room.

Proxies with the same engines (`EngineLoad`) agree without communication. When an engine joins or
leaves, only its own keys move. When shares change, the minimum of keys moves (weighted rendezvous
hashing: Schindelhauer and Schomaker, Weighted Distributed Hash Tables, 2005).
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

from xxhash import xxh3_64_intdigest

from epd.routing.engine_load import EngineLoad
from epd.routing.prefix import Prefix

LOAD_FACTOR = 1.25
"""Factor by which an engine's load may exceed its share before its keys move to others (Mirrokni
et al., Consistent Hashing with Bounded Loads, 2016)."""

OUTLIER = 2.0
"""Factor above the usual load up to which a report counts in full. A wrong report, or one of a
hanging instance, must not raise the bound for all others without limit."""

COMPUTED_FACTOR = 8
"""Weight of a token that a prompt makes an engine compute, against one that waits there already.

A token that another engine has in its cache also evicts a token of other prompts, and delays all
later prompts. With a weight of 1 a busy fleet computes so much again that its queues grow. From 4
on they stay short, and with several proxies from 8 on (`tests/request/test_prefix_fleet.py`).
"""

FEW_REQUESTS = 4
"""Number of unfinished requests below which an engine is not overloaded, however idle the others
are. A second engine computes a prompt again, which costs it more than a few requests in one batch.
"""

_value, _share, _pressure = attrgetter("value"), attrgetter("share"), attrgetter("pressure")


def distances(engines: Sequence[EngineLoad], key: bytes) -> list[float]:
    """Return the distances from a key: exponentially distributed, with the shares as rates."""
    log, digest = math.log, xxh3_64_intdigest
    return [-log((digest(key, engine.seed) + 1) * 2.0**-64) / engine.share for engine in engines]


def upper_bound(engines: Sequence[EngineLoad]) -> Callable[[EngineLoad], int]:
    """Return the maximum load of an engine before its keys move. At least one is always below it.

    The part of a load that an instance only reported is capped: at `OUTLIER` times the lower
    median, plus one request. Local requests always count in full. The cap is above the
    lowest load, which therefore stays below the maximum.
    """
    shares, pressures = sum(map(_share, engines)), sorted(map(_pressure, engines))
    usual = OUTLIER * (pressures[(len(engines) - 1) // 2] + len(engines) / shares)
    if pressures[-1] <= usual:
        requests: float = sum(map(_value, engines))
    else:
        requests = sum(
            min(engine.value, max(engine.under_way, usual * engine.share)) for engine in engines
        )
    each = LOAD_FACTOR * (requests + 1) / shares
    return lambda engine: math.ceil(each * engine.share)


def cheapest_engine(engines: Sequence[EngineLoad], prefix: Prefix) -> EngineLoad:
    """Return the engine with the lowest cost of a prompt, among those that are not overloaded.

    Overloaded are engines at the load bound, unless they have fewer than `FEW_REQUESTS`.

    The cost is the number of tokens of the prompt that the engine's cache lacks, `COMPUTED_FACTOR`
    times, and of the tokens that wait there. The tokens that every cache lacks cost nothing at
    their home, which rendezvous hashing finds by the session, or else by the first link that is new
    to all. Proxies that know nothing of each other therefore send the same new prefix to the same
    engine, and only an engine with the larger part of a prompt attracts it more than its home.

    Requests of other clients at an engine count as the mean of this proxy's. The prompt must not be
    empty.
    """
    most = upper_bound(engines)
    engines = [engine for engine in engines if engine.value < max(most(engine), FEW_REQUESTS)]
    links = [engine.cache.match(prefix) for engine in engines]
    known = max(links)
    first = prefix.links[min(known, len(prefix.links) - 1)].to_bytes(8, "big")
    far = distances(engines, prefix.session.encode("utf-8", "surrogatepass") or first)
    tokens, ends = prefix.tokens, prefix.ends
    lacking = [tokens - ends[found - 1] if found else tokens for found in links]
    lacking[far.index(min(far))] -= min(lacking)
    under_way = sum(engine.under_way for engine in engines)
    each = sum(engine.cache.pending for engine in engines) / under_way if under_way else 0.0
    costs = [
        (
            (
                COMPUTED_FACTOR * lacks
                + engine.cache.pending
                + each * (engine.value - engine.under_way)
            )
            / engine.share,
            engine.pressure,
            away,
        )
        for engine, lacks, away in zip(engines, lacking, far, strict=True)
    ]
    return engines[costs.index(min(costs))]
