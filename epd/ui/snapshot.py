"""Recent events of one process as JSON values, and the totals that the page takes from `/metrics`.

Samples and seconds are on the monotonic clock, which all processes of a machine share. Requests and
notices are on the wall clock, so that each response of the page shows the same times for them.

The totals are those of `/metrics`, looked up by their names and summed over the labels that the
page does not use. So the page and `/metrics` agree, over all workers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, TypedDict, get_args

from prometheus_client.metrics_core import Metric

from epd.api.endpoints import is_api
from epd.events import ItemResult, MediaForm, RequestRecord, StageDone

KEPT_REQUESTS = 64
KEPT_ERRORS = 48
KEPT_CHANGES = 16
"""Upper bound of the kept changes of instances.

They have a buffer of their own, so that failed requests cannot evict the removal of an instance.
"""
KEPT_SAMPLES = 512
"""Upper bound of the kept samples of each stage."""
KEPT_SECONDS = 120

NO_WORK = frozenset({"/v1/models"})
"""Routes of the API that load balancers and similar clients poll."""

CLIENT_ERROR, SERVER_ERROR = 400, 500
CLIENT_CLOSED = 499
"""Statuses of a request: from `CLIENT_ERROR` on a client error, from `SERVER_ERROR` on a failure.
"""

Outcome = Literal["ok", "rejected", "left", "failed"]
"""Result of a client request or of an upstream one.

`ok`: answered. `rejected`: the request itself is invalid (4xx). `left`: the client disconnected.
`failed`: any other error.
"""

Sample = tuple[str, float, float, Outcome]
"""Upstream request: instance, time of its end, duration in seconds, outcome."""


class Second(TypedDict):
    """Counts of the requests and items that ended within one second."""

    at_s: int
    requests: int
    failed: int
    rejected: int
    hit: int
    encoded: int


class StageSpan(TypedDict):
    """Stage of a request. `after_s` is counted from the request's head."""

    stage: str
    instance: str
    after_s: float
    seconds: float
    error: str | None
    outcome: Outcome


class Request(TypedDict):
    """Completed request of a client."""

    id: str
    engine_id: str
    path: str
    status: int
    ended_s: float
    seconds: float
    error: str | None
    outcome: Outcome
    items: dict[ItemResult, int]
    retries: int
    degraded: list[str]
    spans: list[StageSpan]
    more_spans: int


class Notice(TypedDict):
    """Failed client request, with the error and its cause, or a changed instance.

    For an instance, the fields are its URL, its new state and its role; the outcome is `ok`.
    """

    kind: Literal["request", "instance"]
    at_s: float
    what: str
    said: str
    more: str
    outcome: Outcome


class Events(TypedDict):
    """Recent events, oldest first."""

    samples: dict[str, list[Sample]]
    seconds: list[Second]
    requests: list[Request]
    notices: list[Notice]


class Seen(TypedDict):
    """Instance as one process sees it. `requests` counts those under way.

    `prompt_tokens` counts those of requests that came for their content, `prefix_tokens` the part
    that was expected in the prefix cache. `precise`: what the cache holds is known by KV events.
    """

    role: str
    url: str
    state: str
    requests: int
    prompt_tokens: int
    prefix_tokens: int
    precise: bool


class Snapshot(TypedDict):
    """State of one process."""

    instances: list[Seen]
    events: Events


def outcome_of(event: RequestRecord) -> Outcome:
    """Return how a client's request ended. A stream may fail after a status of 200."""
    if event.error is None:
        return "ok"
    if event.status == CLIENT_CLOSED:
        return "left"
    return "rejected" if CLIENT_ERROR <= event.status < SERVER_ERROR else "failed"


def stage_outcome_of(event: StageDone) -> Outcome:
    """Return how a request to an instance ended."""
    if event.error is None:
        return "ok"
    if event.rejected:
        return "rejected"
    return "left" if event.error == "cancelled" else "failed"


def is_work(path: str) -> bool:
    """Return whether requests of a route are shown: those that cause work of instances."""
    return is_api(path) and path not in NO_WORK


LABELS = {
    "epd_requests_total": ("path", "status"),
    "epd_items_total": ("result",),
    "epd_items_sent_total": ("form",),
    "epd_conversation_turns_total": ("result",),
}
"""Labels that the page uses, by sample name. All other labels are summed over."""


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
    5xx, `rejected` 4xx, `left` 499. `refused` is the part of both that admission control rejected.
    """

    requests: int
    failed: int
    rejected: int
    left: int
    refused: int
    retries: int
    degraded: int
    in_flight: int
    queued: int
    loop_lag_s: float
    items: dict[str, int]
    media: dict[str, int]
    saved: Saved
    conversations: ConversationsShown


def metric_totals(families: Iterable[Metric]) -> Totals:
    """Return the totals of a metrics page."""
    sums = _sums(families)

    def count(name: str, *labels: str) -> int:
        return int(sums.get((name, *labels), 0))

    statuses = Counter[int]()
    for (name, *labels), value in sums.items():
        if name == "epd_requests_total" and is_work(labels[0]):
            statuses[int(labels[1])] += int(value)
    left = statuses[CLIENT_CLOSED]
    items = {result: count("epd_items_total", result) for result in get_args(ItemResult)}
    return Totals(
        requests=statuses.total(),
        failed=sum(count for status, count in statuses.items() if status >= SERVER_ERROR),
        rejected=sum(
            count for status, count in statuses.items() if CLIENT_ERROR <= status < SERVER_ERROR
        )
        - left,
        left=left,
        refused=count("epd_requests_refused_total"),
        retries=count("epd_request_retries_total"),
        degraded=count("epd_requests_degraded_total"),
        in_flight=count("epd_requests_in_flight"),
        queued=count("epd_requests_queued"),
        loop_lag_s=sums.get(("epd_event_loop_lag_seconds",), 0.0),
        items=items,
        media={form: count("epd_items_sent_total", form) for form in get_args(MediaForm)},
        saved=_saved(sums),
        conversations=ConversationsShown(
            kept=count("epd_conversations"),
            turns=int(
                sum(sums[name] for name in sums if name[0] == "epd_conversation_turns_total")
            ),
            hit=count("epd_conversation_turns_total", "hit"),
        ),
    )


def _sums(families: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for family in families:
        for name, labels, value, *_ in family.samples:
            key = (name, *(labels.get(label, "") for label in LABELS.get(name, ())))
            sums[key] += value
    return sums


def _saved(sums: Mapping[tuple[str, ...], float]) -> Saved:
    """Return the savings. A counter without samples is absent from the page and counts as 0."""
    return Saved(
        encodes=int(sums.get(("epd_saved_encodes_total",), 0)),
        bytes=int(sums.get(("epd_saved_bytes_total",), 0)),
        encode_seconds=sums.get(("epd_saved_encode_seconds_total",), 0.0),
    )
