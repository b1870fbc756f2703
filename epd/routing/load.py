"""The load of one instance, as far as a proxy can determine it. No I/O.

An instance's report includes local requests (those of this proxy), as of some moment between the
question and the answer. The highest number of local requests in that time is therefore subtracted
from the report. The rest comes from other proxies, or directly from clients:

    load = local requests now + max(0, reported - highest number of local requests meanwhile)

So no local request is counted twice, local requests count as soon as they begin or end, and new
requests of others count from the next report on. A request that an instance splits into several
(`n`, several prompts) counts as what it is split into. Without a recent report, the load is the
number of local requests.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from epd.routing.ranks import Ranks

KEPT_INTERVALS = 3
"""Age of a report, in intervals, after which it expires."""

MIN_KEPT_S = 2.0
"""Minimum age at which a report expires, for short intervals."""

MAX_DOUBLINGS = 5
"""Maximum number of doublings of the interval for an instance without reports: a factor of 32."""


class Report(NamedTuple):
    """The load that an instance reports.

    Attributes:
        waiting: number of queued requests.
        running: number of running requests.
        engines: sum of both, by the number of the data-parallel engine.
    """

    waiting: int
    running: int
    engines: Mapping[int, int]


class Load:
    """The load of one instance.

    Attributes:
        under_way: number of local requests at the instance.
        value: the load, in requests.
        pressure: the load divided by the share; comparable between instances.
        ranks: loads of its data-parallel ranks; None if the instance distributes requests itself.
        report: the last report; None without a recent one.
        seed: seed for hashes, the same in every proxy.
        share: the weight; 1 for a weight of 0, because drained instances are used equally.
    """

    __slots__ = (
        "_asked",
        "_elsewhere",
        "_failures",
        "_intervals",
        "_since_s",
        "_until_s",
        "_weight",
        "pressure",
        "ranks",
        "report",
        "seed",
        "share",
        "under_way",
        "value",
    )

    def __init__(self, url: str, weight: float = 1.0, ranks: Ranks | None = None) -> None:
        self.seed = xxh3_64_intdigest(url.encode())
        self.ranks = ranks
        self.report: Report | None = None
        self.under_way = 0
        self._elsewhere = 0
        self.weight = weight
        self._asked = 0
        self._since_s = -math.inf
        self._intervals = 1.0
        self._until_s = math.inf
        self._failures = 0

    @property
    def weight(self) -> float:
        """The relative share of the load; 0 drains the instance."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = weight
        self.share = weight or 1.0
        self._weigh()

    def begin(self, rank: int | None = None) -> None:
        """Count the start of a local request, for one of the ranks if given."""
        self.under_way += 1
        if asking := self._since_s == math.inf:  # the outstanding report may include it
            self._asked = max(self._asked, self.under_way)
        if self.ranks is not None and rank is not None:
            self.ranks.begin(rank, asking=asking)
        self._weigh()

    def end(self, rank: int | None = None) -> None:
        """Count the end of a local request."""
        self.under_way -= 1
        if self.ranks is not None and rank is not None:
            self.ranks.end(rank)
        self._weigh()

    def expire(self, now_s: float) -> None:
        """Drop a report that is too old."""
        if now_s >= self._until_s:
            self._forget()

    def report_due(self, now_s: float, interval_s: float) -> bool:
        """Return whether a report is due. After True, the caller must ask and call `reported`.

        Args:
            now_s: current time.
            interval_s: current interval of reports; it may change between calls.
        """
        if now_s < self._since_s + self._intervals * interval_s:
            return False
        self._since_s = math.inf
        self._asked = self.under_way
        if self.ranks is not None:
            self.ranks.asked()
        return True

    def reported(self, report: Report | None, now_s: float, interval_s: float) -> None:
        """Record a report.

        Args:
            report: the report; None after a failure.
            now_s: current time.
            interval_s: current interval of reports.
        """
        self._since_s = now_s
        if report is None:
            self._failures = min(self._failures + 1, MAX_DOUBLINGS)
            self._intervals = 2.0**self._failures
            return
        self._failures = 0
        # A different interval for each instance, so that the reports do not coincide.
        self._intervals = 0.9 + 0.2 * self.seed * 2.0**-64
        self._until_s = now_s + max(interval_s * KEPT_INTERVALS, MIN_KEPT_S)
        self.report = report
        self._elsewhere = max(0, report.waiting + report.running - self._asked)
        if self.ranks is not None:
            self.ranks.reported(report.engines)
        self._weigh()

    def leave(self) -> None:
        """Drop the report of a removed instance. It may be added again before its requests end."""
        self._since_s = -math.inf
        self._forget()

    def _forget(self) -> None:
        self.report = None
        self._until_s = math.inf
        self._elsewhere = 0
        if self.ranks is not None:
            self.ranks.reported({})
        self._weigh()

    def _weigh(self) -> None:
        self.value = self.under_way + self._elsewhere
        self.pressure = self.value / self.share
