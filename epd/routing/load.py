"""What one instance has to do, as far as a proxy can know. No I/O.

An instance counts a proxy's requests among its own, at some moment between the question and the
answer. The most that were under way from here in that time are therefore taken off what it reports;
the rest is from elsewhere, from other proxies or straight from clients:

    load = under way from here now + max(0, reported - most under way from here meanwhile)

So no request from here is counted twice, one that begins or ends counts at once, and what others
have begun since is known by the next report. A request that an instance makes
several of (`n`, several prompts) counts as what it makes. Without a report, or with one that is too
old, what is under way from here is all there is.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from epd.routing.ranks import Ranks

KEPT_INTERVALS = 3
"""After how many times the interval a report is too old."""

MIN_KEPT_S = 2.0
"""When no report is too old yet, as short as the interval may be."""

MAX_DOUBLINGS = 5
"""How often the interval is doubled, of an instance that gives none: 32 times as long at most."""


class Report(NamedTuple):
    """What an instance says that it has to do.

    Attributes:
        waiting: requests that it has not begun.
        running: requests that it has.
        engines: both, by the number of the data-parallel engine.
    """

    waiting: int
    running: int
    engines: Mapping[int, int]


class Load:
    """What one instance has to do.

    Attributes:
        under_way: requests from here.
        value: the load, in requests.
        pressure: the same, by the instance's share: what loads of instances are compared by.
        ranks: those of its data-parallel ranks; None: the instance sees to them.
        report: what it has said last; None: nothing, or too long ago.
        seed: its own in hashes, the same in every proxy.
        share: its weight beside others; of those that nothing is for, one is as good as another.
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
        """Begin with nothing to do."""
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
        """How much of all is for it; 0: nothing, unless nobody else can."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = weight
        self.share = weight or 1.0
        self._weigh()

    def begin(self, rank: int | None = None) -> None:
        """It has one more from here, for one of its ranks."""
        self.under_way += 1
        if asking := self._since_s == math.inf:  # the report that is on its way may have it
            self._asked = max(self._asked, self.under_way)
        if self.ranks is not None and rank is not None:
            self.ranks.begin(rank, asking=asking)
        self._weigh()

    def end(self, rank: int | None = None) -> None:
        """It has one less from here."""
        self.under_way -= 1
        if self.ranks is not None and rank is not None:
            self.ranks.end(rank)
        self._weigh()

    def expire(self, now_s: float) -> None:
        """Forget a report that is too old."""
        if now_s >= self._until_s:
            self._forget()

    def report_due(self, now_s: float, interval_s: float) -> bool:
        """Whether to ask for a report. Who is told so asks, and says what came of it.

        Args:
            now_s: the time.
            interval_s: between two questions, as it is now: it may be another than it was.
        """
        if now_s < self._since_s + self._intervals * interval_s:
            return False
        self._since_s = math.inf
        self._asked = self.under_way
        if self.ranks is not None:
            self.ranks.asked()
        return True

    def reported(self, report: Report | None, now_s: float, interval_s: float) -> None:
        """It has said what it has to do; None: it has not.

        Args:
            report: what it said.
            now_s: when.
            interval_s: between two questions.
        """
        self._since_s = now_s
        if report is None:
            self._failures = min(self._failures + 1, MAX_DOUBLINGS)
            self._intervals = 2.0**self._failures
            return
        self._failures = 0
        # Not all at once, wherever they have begun: each at a pace of its own.
        self._intervals = 0.9 + 0.2 * self.seed * 2.0**-64
        self._until_s = now_s + max(interval_s * KEPT_INTERVALS, MIN_KEPT_S)
        self.report = report
        self._elsewhere = max(0, report.waiting + report.running - self._asked)
        if self.ranks is not None:
            self.ranks.reported(report.engines)
        self._weigh()

    def leave(self) -> None:
        """It takes no part any more; it may again, before its requests have ended."""
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
