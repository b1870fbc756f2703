"""Throughput of the arms by hit rate, and where they break even with plain vLLM. No I/O."""

import statistics
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from epd.tools.bench.compare.verdict import PLAIN, Measured


class RatePoint(NamedTuple):
    """Workload of an arm.

    Attributes:
        hit_rate: share of the workload's media with encoder outputs in the store.
        gain: requests/s over those of plain vLLM.
    """

    workload: str
    hit_rate: float
    gain: float


def rate_points(measured: Measured) -> Mapping[str, Sequence[RatePoint]]:
    """Return the points of each arm but plain vLLM, by rising hit rate.

    Workloads of one request at a time, without media and with failed requests have none. An arm
    that reports no hits has the hit rates of the first arm that does.
    """
    hit_rates: dict[str, float] = {}
    for workloads in measured.values():
        for name, figures in workloads.items():
            if items := sum(figures.items.values()):
                hit_rates.setdefault(name, figures.items.get("hit", 0) / items)
    plain = measured.get(PLAIN, {})
    points: dict[str, list[RatePoint]] = {}
    for arm, workloads in measured.items():
        for name, figures in workloads.items() if arm != PLAIN else ():
            pair = [figures, plain[name]] if name in plain and name in hit_rates else []
            if pair and all(each.at_once > 1 and not each.failed for each in pair):
                hit_rate = _hit_rate(figures.items, hit_rates[name])
                gain = figures.requests_per_s / plain[name].requests_per_s
                points.setdefault(arm, []).append(RatePoint(name, hit_rate, gain))
    return {arm: sorted(of_arm, key=attrgetter("hit_rate")) for arm, of_arm in points.items()}


def _hit_rate(items: Mapping[str, int], otherwise: float) -> float:
    total = sum(items.values())
    return items.get("hit", 0) / total if total else otherwise


class TimeLine(NamedTuple):
    """Time of a request over that of plain vLLM, as a line over the hit rate."""

    slope: float
    intercept: float

    def gain_at(self, hit_rate: float) -> float:
        return 1 / max(0.01, self.intercept + self.slope * hit_rate)

    @property
    def break_even(self) -> float | None:
        """Hit rate from 0 to 1 from which on the arm gains; None: there is none."""
        if self.slope >= 0:
            return None
        hit_rate = (1 - self.intercept) / self.slope
        return hit_rate if 0 <= hit_rate <= 1 else None


def time_line(points: Sequence[RatePoint]) -> TimeLine | None:
    """Return the line of least squares; None: the points have one hit rate.

    Each hit saves about the same time, so that time falls in a line and throughput does not.
    """
    if len({point.hit_rate for point in points}) < 2:  # noqa: PLR2004 - a line has two points
        return None
    hit_rates, times = zip(*((point.hit_rate, 1 / point.gain) for point in points), strict=True)
    return TimeLine(*statistics.linear_regression(hit_rates, times))


def crossover(arm: str, points: Sequence[RatePoint]) -> str:
    """Return a sentence about where an arm breaks even with plain vLLM in requests/s."""
    line = time_line(points)
    if line is not None and (break_even := line.break_even) is not None:
        return f"`{arm}` breaks even with plain vLLM at a hit rate of about {break_even:.0%}."
    rates = f"hit rates of {points[0].hit_rate:.0%} to {points[-1].hit_rate:.0%}"
    gaining = sum(point.gain > 1 for point in points)
    if 0 < gaining < len(points):
        return f"`{arm}` gains at some {rates}, and does not gain more with more hits."
    more = "more" if gaining else "no more"
    return f"`{arm}` answers {more} requests/s than plain vLLM at {rates}."
