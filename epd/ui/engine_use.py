"""Use of the instances' caches, from pages of metrics that the proxy reads for its balances. Pure.

A page is parsed for it only while a client reads the operator's page.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from ec_store.bounded import BoundedDict
from epd.routing.reports import KV_USAGE, samples

LOOKED_S = 15.0
"""Time in seconds after a look at the operator's page for which pages of metrics are parsed."""

MAX_INSTANCES = 4096
"""Upper bound of the instances with a known use, those included that have left."""

PREFIX_QUERIES = b"vllm:prefix_cache_queries_total"
PREFIX_HITS = b"vllm:prefix_cache_hits_total"
"""vLLM's counters of prompt tokens that were looked up in the prefix cache, and found
(`PrometheusStatLogger`, vllm/v1/metrics/loggers.py)."""


class EngineUse(NamedTuple):
    """Use of an instance's caches, as shares from 0 to 1; None if it is unknown.

    Attributes:
        kv_usage: KV blocks in use, the mean over its engines.
        prefix_hits: prompt tokens that were found in the prefix cache, since the engines' start.
    """

    kv_usage: float | None
    prefix_hits: float | None


NO_USE = EngineUse(None, None)


class EngineUses:
    """Use of the caches of instances, by URL, while a client looks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s = -math.inf
        self._uses: BoundedDict[str, EngineUse] = BoundedDict(MAX_INSTANCES)

    def look(self) -> None:
        """Note that a client looks. What was read for an earlier one is forgotten."""
        now_s = self._clock()
        if now_s >= self._until_s:
            self._uses.clear()
        self._until_s = now_s + LOOKED_S

    def note_page(self, url: str, page: bytes) -> None:
        if self._clock() < self._until_s:
            self._uses[url] = read_use(page)

    def of(self, url: str) -> EngineUse:
        return self._uses.get(url, NO_USE)


def read_use(page: bytes) -> EngineUse:
    """Return the use on a page of metrics, over all its engines."""
    try:
        usages = [value for _, value in samples(page, KV_USAGE)]
        queries, hits = (
            sum(value for _, value in samples(page, name)) for name in (PREFIX_QUERIES, PREFIX_HITS)
        )
    except ValueError:
        return NO_USE
    return EngineUse(_share(sum(usages), len(usages)), _share(hits, queries))


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if 0 <= part <= whole and 0 < whole < math.inf else None
