"""The load of one engine, as far as a proxy can determine it. No I/O.

An instance's report includes local requests (those of this proxy), as of some moment between the
question and the answer. The highest number of local requests in that time is therefore subtracted
from the report. The rest comes from other proxies, or directly from clients:

    load = local requests now + max(0, reported - highest number of local requests meanwhile)

So no local request is counted twice, local requests count as soon as they begin or end, and new
requests of others count from the next report on. A request that an instance splits into several
(`n`, several prompts) counts as all its parts. Without a recent report, the load is the number of
local requests.
"""

import time
from collections.abc import Callable

from epd.routing.prefix import PrefixCache


class EngineLoad:
    """Load of an instance, or of one of the data-parallel ranks behind its URL.

    Attributes:
        seed: seed for hashes, the same in every proxy.
        share: relative share of the load, above 0.
        cache: known content of its prefix cache.
        under_way: number of local requests.
        value: the load, in requests.
        pressure: the load divided by the share; comparable between engines.
    """

    def __init__(self, seed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seed = seed
        self.share = 1.0
        self.cache = PrefixCache(clock)
        self.under_way = self.value = self._highest = 0
        self.pressure = 0.0

    def set_share(self, share: float) -> None:
        self.share = share
        self.pressure = self.value / share

    def begin_request(self) -> None:
        self.under_way += 1
        # An outstanding report may include it.
        if self.under_way > self._highest:  # noqa: PLR1730 - a call costs more
            self._highest = self.under_way
        self.value += 1
        self.pressure = self.value / self.share

    def end_request(self) -> None:
        self.under_way -= 1
        self.value -= 1
        self.pressure = self.value / self.share

    def report_requested(self) -> None:
        """Begin the time in which the highest number of local requests counts."""
        self._highest = self.under_way

    def set_reported(self, requests: int) -> None:
        """Set the reported number of requests; 0 without a recent report."""
        self.value = self.under_way + max(0, requests - self._highest)
        self.pressure = self.value / self.share
