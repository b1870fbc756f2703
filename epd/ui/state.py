"""Document of `GET /ui/state`, combined from the states of all processes. Pure.

The totals are those of `/metrics`, so both agree over all workers.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import chain
from operator import itemgetter
from string import digits
from types import MappingProxyType
from typing import NamedTuple, get_args

from prometheus_client.metrics_core import Metric
from typing_extensions import TypedDict

from epd.events import CLIENT_CLOSED, ItemResult, MediaForm
from epd.ui.formats import bytes_text, plural, seconds_text, share_text
from epd.ui.recent import (
    CLIENT_ERROR,
    KEPT_CHANGES,
    KEPT_ERRORS,
    KEPT_REQUESTS,
    KEPT_SAMPLES,
    SERVER_ERROR,
    InstanceState,
    Notice,
    RecentRequest,
    Sample,
    Second,
    Snapshot,
    empty_second,
    is_work,
)
from epd.version import __version__

RATE_S = 10.0
"""Window of rates, in seconds."""
WINDOW_S = 300.0
"""Window of latencies, in seconds. The ring buffers may reach back less far."""
NOW_S = 5
"""Window of the current rate of requests, and of each point of a graph, in seconds: one of 1 s
would jump."""
SPARK_S = 60
"""Number of seconds in the graphs."""

WORST = ("healthy", "trial", "ejected", "down")
"""States of an instance, the worst last. If workers differ, the worst state is shown."""
SERVES = {"encode": "encode", "prefill": "prefill", "decode": "decode", "prefill_decode": "decode"}
"""Stage of each role."""
LETTERS = {"encode": "E", "prefill": "P", "decode": "D", "prefill_decode": "PD"}
"""Letters of the roles, in their order."""
FLOWS = ("queue", "store", "encode", "prefill", "decode", "release")
"""Stages in their order."""


class Saved(TypedDict):
    """Savings by hits. `bytes`: media that were sent to no instance."""

    encodes: int
    bytes: int
    encode_seconds: float


class ConversationsShown(TypedDict):
    """Conversations: `kept` now (0 if they are in Redis), turns, and turns that hit."""

    kept: int
    turns: int
    hit: int


class Totals(TypedDict):
    """Totals since the start of the proxy; `in_flight` and `queued` are current values.

    `media` counts items by the form in which they were sent to prefill and decode. `failed` counts
    5xx, `rejected` 4xx without 499, with which the client disconnected. `quarantined` is
    the current number of tenants in quarantine, counted by each worker.
    """

    requests: int
    failed: int
    rejected: int
    in_flight: int
    queued: int
    quarantined: int
    items: dict[str, int]
    media: dict[str, int]
    saved: Saved
    conversations: ConversationsShown


class Durations(TypedDict):
    """Durations of requests over the last five minutes; None if there are none.

    `history` has the median of the last `NOW_S` seconds, for each second of the graphs.
    """

    count: int
    p50_s: float | None
    p90_s: float | None
    history: list[float | None]


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


class EngineShown(TypedDict):
    """Report of an instance about itself; None if it is unknown.

    `waiting` counts its queued requests of all proxies. `kv_usage` is the share of its KV
    blocks in use, `prefix_hits` the share of prompt tokens found in its prefix cache since it has
    started. Both are read only while the page is.
    """

    version: str | None
    waiting: int | None
    kv_usage: float | None
    prefix_hits: float | None


class InstanceShown(Latency, InstanceState, EngineShown):
    """Latency and state of one instance.

    `name` is its letters and number, such as `E1`, or `EPD1` of one that does all three.
    """

    name: str


class StoreShown(TypedDict):
    """Use of an encoder store; None if it is unknown, and without `known` if it does not answer.

    `name` is the kind of the store, or the address of a host's memory. `bypassed`: requests skip
    it for some seconds, because it failed. `refused` counts writes that found no room.
    """

    name: str
    known: bool
    bypassed: bool
    entries: int | None
    bytes: int | None
    max_bytes: int | None
    evictions: int | None
    refused: int | None


class UiState(TypedDict):
    """State that `/ui` and `epd top` show. Times are Unix seconds; newest first.

    `topology` is the number of instances by role, such as `2e1pd`. `summary` has sentences, of
    which every second part is a figure. `per_s` counts requests of the last five seconds, `minute`
    what ended within the last minute. `answered` has the whole durations of answered requests,
    `first_token` the times to the first token of streams. `stores` has a row for each memory of a
    host, or for the one store.
    """

    version: str
    now: float
    workers: int
    store: str | None
    stores: list[StoreShown]
    topology: str
    summary: list[list[str]]
    totals: Totals
    per_s: float
    minute: Second
    answered: Durations
    first_token: Durations
    instances: list[InstanceShown]
    stages: list[StageShown]
    seconds: list[Second]
    requests: list[RecentRequest]
    notices: list[Notice]


class Moment(NamedTuple):
    """Time of a document, on the monotonic and on the wall clock."""

    monotonic_s: float
    unix_s: float


class Looked(NamedTuple):
    """What is read only while a client reads the page: the stores, and engines by URL."""

    stores: Sequence[StoreShown] = ()
    engines: Mapping[str, EngineShown] = MappingProxyType({})


def state(
    snapshots: Sequence[Snapshot],
    totals: Totals,
    store: str | None,
    now: Moment,
    looked: Looked = Looked(),  # noqa: B008 - immutable
) -> UiState:
    """Return the document. `store` is the kind of the proxy's encoder store, such as `redis`."""
    flows = {stage: _flow(stage, snapshots, now.monotonic_s) for stage in FLOWS}
    instances = _instances(snapshots, flows, looked.engines)
    seconds, requests = _seconds(snapshots, now), _requests(snapshots)
    letters = Counter(instance["name"].rstrip(digits).lower() for instance in instances)
    since_s = now.monotonic_s - WINDOW_S
    answers = [answer for each in snapshots for answer in each["answers"] if answer[0] > since_s]
    return UiState(
        version=__version__,
        now=round(now.unix_s, 3),
        workers=len(snapshots),
        store=store,
        stores=list(looked.stores),
        topology="".join(f"{count}{kind}" for kind, count in letters.items()),
        summary=[text.split("*") for text in _sentences(totals, encodes=bool(letters["e"]))],
        totals=totals,
        per_s=sum(second["requests"] for second in seconds[-NOW_S:]) / NOW_S,
        minute=_sum_seconds(seconds),
        answered=_durations(((at_s, value_s) for at_s, value_s, _ in answers), now.monotonic_s),
        first_token=_durations(((at_s, value_s) for at_s, _, value_s in answers), now.monotonic_s),
        instances=instances,
        stages=[StageShown(stage=stage, **flow.latency_of_all()) for stage, flow in flows.items()],
        seconds=seconds,
        requests=requests,
        notices=_notices(snapshots),
    )


def _sentences(totals: Totals, *, encodes: bool) -> Iterator[str]:
    """Yield what the proxy saved, with the figures between asterisks.

    `encodes`: whether there are encode instances.
    """
    saved, items, turns = totals["saved"], totals["items"], totals["conversations"]
    if any(items.values()) or (encodes and not turns["turns"]):
        text = f"Saved *{plural(saved['encodes'], 'encode')}*"
        if saved["bytes"]:
            text += f", *{bytes_text(saved['bytes'])}* of media not sent"
        if saved["encode_seconds"]:  # otherwise no encode has shown its duration
            text += f", about *{seconds_text(saved['encode_seconds'])}* of encoding"
        yield f"{text}."
        rate = f"Hit rate *{share_text(items['hit'], sum(items.values()))}*"
        if sent := sum(totals["media"].values()):
            metadata = share_text(totals["media"]["metadata"], sent)
            rate += f"; *{metadata}* of media sent as metadata, *{totals['media']['raw']:,}* raw"
        yield f"{rate}."
    if turns["turns"] or turns["kept"]:
        kept = f"; *{plural(turns['kept'], 'conversation')}* kept" if turns["kept"] else ""
        share = share_text(turns["hit"], turns["turns"])
        yield f"Of *{plural(turns['turns'], 'turn')}*, *{share}* reused decode's KV blocks{kept}."
    if totals["quarantined"]:
        tenants = plural(totals["quarantined"], "tenant")
        yield f"In quarantine: *{tenants}* with requests that ended instances."


def _sum_seconds(seconds: Sequence[Second]) -> Second:
    total = empty_second(seconds[0]["at_s"])
    for second in seconds:
        _add_second(total, second)
    return total


def _add_second(into: Second, second: Second) -> None:
    into["requests"] += second["requests"]
    into["failed"] += second["failed"]
    into["rejected"] += second["rejected"]
    into["hit"] += second["hit"]
    into["encoded"] += second["encoded"]


def _durations(samples: Iterable[tuple[float, float | None]], now_s: float) -> Durations:
    """Return the durations of samples: each is the time of its end, and its seconds if known."""
    last = int(now_s) - 1
    by_second: dict[int, list[float]] = defaultdict(list)
    known = list[float]()
    for ended_s, seconds in samples:
        if seconds is not None:
            known.append(seconds)
            by_second[int(ended_s)].append(seconds)
    known.sort()
    history = [
        sorted(chain.from_iterable(by_second.get(at - ago, ()) for ago in range(NOW_S)))
        for at in range(last - SPARK_S + 1, last + 1)
    ]
    return Durations(
        count=len(known),
        p50_s=quantile(known, 0.5),
        p90_s=quantile(known, 0.9),
        history=[quantile(window, 0.5) for window in history],
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
        return _latency(list(chain(*self.samples.values())), sum(self.rates.values()))


def _flow(stage: str, snapshots: Iterable[Snapshot], now_s: float) -> Flow:
    samples: dict[str, list[Sample]] = defaultdict(list)
    rates: dict[str, float] = defaultdict(float)
    for snapshot in snapshots:
        ring = snapshot["samples"].get(stage, [])
        span_s = RATE_S
        if len(ring) == KEPT_SAMPLES:  # the ring may reach back less far
            span_s = min(RATE_S, max(0.1, now_s - ring[0][1]))
        for sample in ring:
            instance, ended_s, *_ = sample
            if ended_s > now_s - WINDOW_S:
                samples[instance].append(sample)
            if ended_s > now_s - span_s:
                rates[instance] += 1 / span_s
    return Flow(samples, rates)


NO_ENGINE = EngineShown(version=None, waiting=None, kv_usage=None, prefix_hits=None)


def _instances(
    snapshots: Sequence[Snapshot], flows: Mapping[str, Flow], engines: Mapping[str, EngineShown]
) -> list[InstanceShown]:
    seen: dict[tuple[str, str], InstanceState] = {}
    for reported in chain.from_iterable(snapshot["instances"] for snapshot in snapshots):
        key = reported["role"], reported["url"]
        if (known := seen.get(key)) is None:
            seen[key] = {**reported}
            continue
        known["requests"] += reported["requests"]
        known["prompt_tokens"] += reported["prompt_tokens"]
        known["prefix_tokens"] += reported["prefix_tokens"]
        known["precise"] &= reported["precise"]
        known["writes"] |= reported["writes"]
        worst = max(known, reported, key=lambda report: WORST.index(report["state"]))
        known["state"], known["cause"] = worst["state"], worst["cause"]
        measured = (known["kv_bytes_per_s"] or 0.0, reported["kv_bytes_per_s"] or 0.0)
        known["kv_bytes_per_s"] = max(measured) or None
    numbers = Counter[str]()
    shown = list[InstanceShown]()
    for instance in seen.values():
        role, url = instance["role"], instance["url"]
        letters = "EPD" if role == "prefill_decode" and instance["writes"] else LETTERS[role]
        numbers[letters] += 1
        name, latency = f"{letters}{numbers[letters]}", flows[SERVES[role]].latency_of(url)
        engine = engines.get(url, NO_ENGINE)
        shown.append(InstanceShown(name=name, **instance, **latency, **engine))
    return shown


def _seconds(snapshots: Iterable[Snapshot], now: Moment) -> list[Second]:
    """Return the last whole seconds, oldest first, including those without requests."""
    last = int(now.monotonic_s) - 1
    shown = {
        at: empty_second(int(now.unix_s - now.monotonic_s + at))
        for at in range(last - SPARK_S + 1, last + 1)
    }
    for second in chain.from_iterable(snapshot["seconds"] for snapshot in snapshots):
        if (into := shown.get(second["at_s"])) is not None:
            _add_second(into, second)
    return list(shown.values())


def _requests(snapshots: Iterable[Snapshot]) -> list[RecentRequest]:
    found = chain.from_iterable(snapshot["requests"] for snapshot in snapshots)
    return nlargest(KEPT_REQUESTS, found, key=itemgetter("ended_s"))


def _notices(snapshots: Iterable[Snapshot]) -> list[Notice]:
    at = itemgetter("at_s")
    found = chain.from_iterable(snapshot["notices"] for snapshot in snapshots)
    newest = sorted(found, key=at, reverse=True)
    errors = [notice for notice in newest if notice["kind"] == "request"][:KEPT_ERRORS]
    changes = [notice for notice in newest if notice["kind"] == "instance"][:KEPT_CHANGES]
    return sorted((*errors, *changes), key=at, reverse=True)


def metric_totals(families: Iterable[Metric]) -> Totals:
    """Return the totals of a metrics page, summed over the labels that the page does not use."""
    samples = [
        sample for family in families if family.type != "histogram" for sample in family.samples
    ]

    def total(name: str, **labels: str) -> float:
        # A counter without samples is absent from the page.
        return sum(
            value
            for found, of_labels, value, *_ in samples
            if found == name and of_labels.items() >= labels.items()
        )

    def count(name: str, **labels: str) -> int:
        return int(total(name, **labels))

    statuses = Counter[int]()
    for name, labels, value, *_ in samples:
        if name == "epd_requests_total" and is_work(labels["path"]):
            statuses[int(labels["status"])] += int(value)
    failed = sum(statuses[status] for status in statuses if status >= SERVER_ERROR)
    client_errors = sum(
        statuses[status] for status in statuses if CLIENT_ERROR <= status < SERVER_ERROR
    )
    return Totals(
        requests=statuses.total(),
        failed=failed,
        rejected=client_errors - statuses[CLIENT_CLOSED],
        in_flight=count("epd_requests_in_flight"),
        queued=count("epd_requests_queued"),
        quarantined=count("epd_quarantined_tenants"),
        items={result: count("epd_items_total", result=result) for result in get_args(ItemResult)},
        media={form: count("epd_items_sent_total", form=form) for form in get_args(MediaForm)},
        saved=Saved(
            encodes=count("epd_saved_encodes_total"),
            bytes=count("epd_saved_bytes_total"),
            encode_seconds=total("epd_saved_encode_seconds_total"),
        ),
        conversations=ConversationsShown(
            kept=count("epd_conversations"),
            turns=count("epd_conversation_turns_total"),
            hit=count("epd_conversation_turns_total", result="hit"),
        ),
    )
