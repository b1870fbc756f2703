"""The document of `GET /ui/state`: what all processes know, put together. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from epd.ui.snapshot import (
    KEPT_NOTICES,
    KEPT_REQUESTS,
    KEPT_SAMPLES,
    Notice,
    Request,
    Sample,
    Second,
    Seen,
    Snapshot,
)
from epd.ui.totals import Totals
from epd.version import __version__

RATE_S = 10.0
"""What rates are of."""
WINDOW_S = 300.0
"""What latencies are of, as far back as the rings reach."""
SPARK_S = 60
"""How many seconds of rates are shown."""

WORST = ("healthy", "trial", "ejected", "down")
"""States of an instance, the worst last: of several workers that differ, it counts."""
SERVES = {
    "encode": "encode",
    "prefill": "prefill",
    "decode": "decode",
    "prefill_decode": "decode",
}
"""The stage of each role."""
FLOWS = ("queue", "store", "encode", "prefill", "decode", "release")
"""Stages, in their order."""


class Latency(TypedDict):
    """Of the last five minutes; quantiles are None where nothing ended well."""

    rate: float
    failed: int
    count: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None


class StageShown(Latency):
    """One stage, of all instances."""

    stage: str


class InstanceShown(Latency):
    """One instance."""

    role: str
    url: str
    state: str
    requests: int


class State(TypedDict):
    """What the page shows. Times are Unix seconds; newest first."""

    version: str
    now: float
    workers: int
    store: str | None
    totals: Totals
    instances: list[InstanceShown]
    stages: list[StageShown]
    seconds: list[Second]
    requests: list[Request]
    notices: list[Notice]


class Moment(NamedTuple):
    """Now: by the monotonic clock, and by the one on the wall."""

    monotonic_s: float
    unix_s: float

    def unix(self, monotonic_s: float) -> float:
        """When it was, by the clock on the wall."""
        return round(self.unix_s - self.monotonic_s + monotonic_s, 3)


def state(snapshots: Sequence[Snapshot], totals: Totals, store: str | None, now: Moment) -> State:
    """All of it.

    Args:
        snapshots: of each process.
        totals: of all of them.
        store: what kind of encoder-cache store the proxy asks, such as `redis`.
        now: when.
    """
    stages = _stages(snapshots, now.monotonic_s)
    return State(
        version=__version__,
        now=round(now.unix_s, 3),
        workers=len(snapshots),
        store=store,
        totals=totals,
        instances=_instances(snapshots, stages),
        stages=[StageShown(stage=stage, **stages[stage].latency()) for stage in FLOWS],
        seconds=_seconds(snapshots, now),
        requests=_requests(snapshots, now),
        notices=_notices(snapshots, now),
    )


@dataclass(frozen=True, slots=True)
class Samples:
    """Requests to instances that ended within the window.

    Attributes:
        samples: each.
        rates: how many end in a second now, by instance.
    """

    samples: Sequence[Sample]
    rates: Mapping[str, float]

    def of(self, instance: str) -> "Samples":
        """Those of one instance."""
        return Samples(
            [one for one in self.samples if one[0] == instance],
            {instance: self.rates.get(instance, 0.0)},
        )

    def latency(self) -> Latency:
        """What they say."""
        seconds = sorted(seconds for _, _, seconds, failed in self.samples if not failed)
        return Latency(
            rate=round(sum(self.rates.values()), 2),
            failed=len(self.samples) - len(seconds),
            count=len(self.samples),
            p50_s=quantile(seconds, 0.5),
            p95_s=quantile(seconds, 0.95),
            p99_s=quantile(seconds, 0.99),
        )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The nearest rank: the least of them that so large a share is not above."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _stages(snapshots: Sequence[Snapshot], now_s: float) -> dict[str, Samples]:
    stages = {}
    for stage in FLOWS:
        rings = [snapshot["events"]["samples"].get(stage, []) for snapshot in snapshots]
        rates: dict[str, float] = {}
        for instance, rate in (pair for ring in rings for pair in _rates(ring, now_s)):
            rates[instance] = rates.get(instance, 0.0) + rate
        late = [one for ring in rings for one in ring if one[1] > now_s - WINDOW_S]
        stages[stage] = Samples(late, rates)
    return stages


def _rates(ring: Sequence[Sample], now_s: float) -> Iterator[tuple[str, float]]:
    """How much each sample adds to its instance's rate."""
    span_s = RATE_S
    if len(ring) == KEPT_SAMPLES:  # it may reach back less far
        span_s = min(RATE_S, max(0.1, now_s - ring[0][1]))
    for instance, ended_s, *_ in ring:
        if ended_s > now_s - span_s:
            yield instance, 1 / span_s


def _instances(snapshots: Sequence[Snapshot], stages: Mapping[str, Samples]) -> list[InstanceShown]:
    seen: dict[tuple[str, str], Seen] = {}
    for one in (one for snapshot in snapshots for one in snapshot["instances"]):
        known = seen.setdefault((one["role"], one["url"]), Seen(**{**one, "requests": 0}))
        known["requests"] += one["requests"]
        known["state"] = max(known["state"], one["state"], key=WORST.index)
    return [
        InstanceShown(**one, **stages[SERVES[one["role"]]].of(one["url"]).latency())
        for one in seen.values()
    ]


def _seconds(snapshots: Iterable[Snapshot], now: Moment) -> list[Second]:
    """The last whole seconds, oldest first, those too in which nothing ended."""
    last = int(now.monotonic_s) - 1
    shown = {
        at: Second(at_s=int(now.unix(at)), requests=0, failed=0, hit=0, encoded=0)
        for at in range(last - SPARK_S + 1, last + 1)
    }
    for second in (one for snapshot in snapshots for one in snapshot["events"]["seconds"]):
        if (into := shown.get(second["at_s"])) is not None:
            into["requests"] += second["requests"]
            into["failed"] += second["failed"]
            into["hit"] += second["hit"]
            into["encoded"] += second["encoded"]
    return list(shown.values())


def _requests(snapshots: Iterable[Snapshot], now: Moment) -> list[Request]:
    found = [one for snapshot in snapshots for one in snapshot["events"]["requests"]]
    found.sort(key=lambda one: one["ended_s"], reverse=True)
    return [
        Request(**{**one, "ended_s": now.unix(one["ended_s"])}) for one in found[:KEPT_REQUESTS]
    ]


def _notices(snapshots: Iterable[Snapshot], now: Moment) -> list[Notice]:
    found = [one for snapshot in snapshots for one in snapshot["events"]["notices"]]
    found.sort(key=lambda one: one["at_s"], reverse=True)
    return [Notice(**{**one, "at_s": now.unix(one["at_s"])}) for one in found[:KEPT_NOTICES]]
