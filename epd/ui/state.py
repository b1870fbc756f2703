"""Document of `GET /ui/state`, combined from the states of all processes. Pure."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypedDict

from epd.ui.snapshot import (
    KEPT_CHANGES,
    KEPT_ERRORS,
    KEPT_REQUESTS,
    KEPT_SAMPLES,
    Notice,
    Request,
    Sample,
    Second,
    Seen,
    Snapshot,
    Totals,
)
from epd.version import __version__

RATE_S = 10.0
"""Window of rates, in seconds."""
WINDOW_S = 300.0
"""Window of latencies, in seconds. The ring buffers may reach back less far."""
SPARK_S = 60
"""Number of seconds in the graphs of rates."""

WORST = ("healthy", "trial", "ejected", "down")
"""States of an instance, the worst last. If workers differ, the worst state is shown."""
SERVES = {"encode": "encode", "prefill": "prefill", "decode": "decode", "prefill_decode": "decode"}
"""Stage of each role."""
FLOWS = ("queue", "store", "encode", "prefill", "decode", "release")
"""Stages in their order."""


class Latency(TypedDict):
    """Latency over the last five minutes. Quantiles are None if no request succeeded.

    `failed` counts requests that failed at the instance, `rejected` those that were invalid.
    """

    rate: float
    failed: int
    rejected: int
    count: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None


class StageShown(Latency):
    """Latency of one stage, over all instances."""

    stage: str


class InstanceShown(Latency):
    """Latency and state of one instance."""

    role: str
    url: str
    state: str
    requests: int
    prompt_tokens: int
    prefix_tokens: int
    precise: bool


class UiState(TypedDict):
    """State that the page shows. Times are Unix seconds; newest first."""

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
    """Time of a document, on the monotonic and on the wall clock."""

    monotonic_s: float
    unix_s: float


def state(snapshots: Sequence[Snapshot], totals: Totals, store: str | None, now: Moment) -> UiState:
    """Return the document.

    Args:
        snapshots: states of the processes.
        totals: totals over all processes.
        store: kind of the proxy's encoder store, such as `redis`.
        now: time of the document.
    """
    flows = {stage: _flow(stage, snapshots, now.monotonic_s) for stage in FLOWS}
    return UiState(
        version=__version__,
        now=round(now.unix_s, 3),
        workers=len(snapshots),
        store=store,
        totals=totals,
        instances=_instances(snapshots, flows),
        stages=[StageShown(stage=stage, **flow.latency_of_all()) for stage, flow in flows.items()],
        seconds=_seconds(snapshots, now),
        requests=_requests(snapshots),
        notices=_notices(snapshots),
    )


def _latency(samples: Sequence[Sample], rate: float) -> Latency:
    """Return the latency of samples; `rate` is their number per second."""
    seconds = sorted(seconds for _, _, seconds, outcome in samples if outcome == "ok")
    outcomes = Counter(outcome for *_, outcome in samples)
    return Latency(
        rate=round(rate, 2),
        failed=outcomes["failed"],
        rejected=outcomes["rejected"],
        count=len(samples),
        p50_s=quantile(seconds, 0.5),
        p95_s=quantile(seconds, 0.95),
        p99_s=quantile(seconds, 0.99),
    )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the quantile by nearest rank: the least value with this share at or below it."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


class Flow(NamedTuple):
    """Recent requests of one stage: the samples in the window, and the current rates."""

    samples: Mapping[str, Sequence[Sample]]
    rates: Mapping[str, float]

    def latency_of(self, instance: str) -> Latency:
        return _latency(self.samples.get(instance, ()), self.rates.get(instance, 0.0))

    def latency_of_all(self) -> Latency:
        """Return the latency over all instances."""
        return _latency(list(chain(*self.samples.values())), sum(self.rates.values()))


def _flow(stage: str, snapshots: Iterable[Snapshot], now_s: float) -> Flow:
    samples: dict[str, list[Sample]] = defaultdict(list)
    rates: dict[str, float] = defaultdict(float)
    for snapshot in snapshots:
        ring = snapshot["events"]["samples"].get(stage, [])
        for one in ring:
            if one[1] > now_s - WINDOW_S:
                samples[one[0]].append(one)
        for instance, rate in _rates(ring, now_s):
            rates[instance] += rate
    return Flow(samples, rates)


def _rates(ring: Sequence[Sample], now_s: float) -> Iterator[tuple[str, float]]:
    """Yield each sample's contribution to its instance's rate."""
    span_s = RATE_S
    if len(ring) == KEPT_SAMPLES:  # the ring may reach back less far
        span_s = min(RATE_S, max(0.1, now_s - ring[0][1]))
    for instance, ended_s, *_ in ring:
        if ended_s > now_s - span_s:
            yield instance, 1 / span_s


def _instances(snapshots: Sequence[Snapshot], flows: Mapping[str, Flow]) -> list[InstanceShown]:
    seen: dict[tuple[str, str], Seen] = {}
    for one in (one for snapshot in snapshots for one in snapshot["instances"]):
        key = one["role"], one["url"]
        if (known := seen.get(key)) is None:
            seen[key] = {**one}
            continue
        known["requests"] += one["requests"]
        known["prompt_tokens"] += one["prompt_tokens"]
        known["prefix_tokens"] += one["prefix_tokens"]
        known["precise"] &= one["precise"]
        known["state"] = max(known["state"], one["state"], key=WORST.index)
    return [
        InstanceShown(**one, **flows[SERVES[one["role"]]].latency_of(one["url"]))
        for one in seen.values()
    ]


def _seconds(snapshots: Iterable[Snapshot], now: Moment) -> list[Second]:
    """Return the last whole seconds, oldest first, including those without requests."""
    last = int(now.monotonic_s) - 1
    shown = {
        at: Second(
            at_s=int(now.unix_s - now.monotonic_s + at),
            requests=0,
            failed=0,
            rejected=0,
            hit=0,
            encoded=0,
        )
        for at in range(last - SPARK_S + 1, last + 1)
    }
    for second in (one for snapshot in snapshots for one in snapshot["events"]["seconds"]):
        if (into := shown.get(second["at_s"])) is not None:
            into["requests"] += second["requests"]
            into["failed"] += second["failed"]
            into["rejected"] += second["rejected"]
            into["hit"] += second["hit"]
            into["encoded"] += second["encoded"]
    return list(shown.values())


def _requests(snapshots: Iterable[Snapshot]) -> list[Request]:
    found = [one for snapshot in snapshots for one in snapshot["events"]["requests"]]
    found.sort(key=lambda one: one["ended_s"], reverse=True)
    return found[:KEPT_REQUESTS]


def _notices(snapshots: Iterable[Snapshot]) -> list[Notice]:
    found = [one for snapshot in snapshots for one in snapshot["events"]["notices"]]
    found.sort(key=_at, reverse=True)
    errors = [one for one in found if one["kind"] == "request"][:KEPT_ERRORS]
    changes = [one for one in found if one["kind"] == "instance"][:KEPT_CHANGES]
    return sorted((*errors, *changes), key=_at, reverse=True)


def _at(notice: Notice) -> float:
    return notice["at_s"]
