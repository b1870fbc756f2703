"""What one process knows of late, as values that go through JSON to the one that is asked.

Samples and seconds are on the monotonic clock, which is the same for all processes of a machine.
Requests and notices are on the clock on the wall: what one call of the page says of their times,
the next one says too.

The figures of the page that are those of `/metrics`, found there by their names.

So both say the same, and they are of all workers. Labels that are not asked for are summed over.
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
"""Of instances. Their own, so that no client's bad requests push out an instance that went."""
KEPT_SAMPLES = 512
"""For each stage."""
KEPT_SECONDS = 120

NO_WORK = frozenset({"/v1/models"})
"""Of the API: asked for by load balancers and such, again and again."""

CLIENT_ERROR, SERVER_ERROR = 400, 500
CLIENT_CLOSED = 499
"""Statuses of a request: from `CLIENT_ERROR` on the client's, from `SERVER_ERROR` on a failure."""

Outcome = Literal["ok", "rejected", "left", "failed"]
"""How a request ended, of a client or to an instance: answered; rejected, the request itself being
at fault (4xx); left, its client disconnected; failed."""

Sample = tuple[str, float, float, Outcome]
"""Of one request to an instance: the instance, when it ended, how long it took, how it ended."""


class Second(TypedDict):
    """What ended in one second that something ended in."""

    at_s: int
    requests: int
    failed: int
    rejected: int
    hit: int
    encoded: int


class Span(TypedDict):
    """One stage of a request; `after_s` from the request's head."""

    stage: str
    instance: str
    after_s: float
    seconds: float
    error: str | None
    outcome: Outcome


class Request(TypedDict):
    """A client's request that has ended."""

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
    spans: list[Span]
    more_spans: int


class Notice(TypedDict):
    """A request that ended in an error, with the error and its cause; or an instance that changed.

    Of an instance it says its URL, its new state and its role; its outcome is `ok`.
    """

    kind: Literal["request", "instance"]
    at_s: float
    what: str
    said: str
    more: str
    outcome: Outcome


class Events(TypedDict):
    """What happened, oldest first."""

    samples: dict[str, list[Sample]]
    seconds: list[Second]
    requests: list[Request]
    notices: list[Notice]


class Seen(TypedDict):
    """An instance as one process sees it; `requests` are those under way."""

    role: str
    url: str
    state: str
    requests: int


class Snapshot(TypedDict):
    """All that one process knows."""

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
    """Whether requests of a route are shown: those that instances work for."""
    return is_api(path) and path not in NO_WORK


LABELS = {
    "epd_requests_total": ("path", "status"),
    "epd_items_total": ("result",),
    "epd_items_sent_total": ("form",),
    "epd_conversation_turns_total": ("result",),
}
"""The labels that samples are told apart by here; others have none."""


class Saved(TypedDict):
    """What hits have saved; `bytes` of media that were sent to no instance."""

    encodes: int
    bytes: int
    encode_seconds: float


class ConversationsShown(TypedDict):
    """Conversations: `kept` of them now, 0 where nobody counts; turns, and those that hit."""

    kept: int
    turns: int
    hit: int


class Totals(TypedDict):
    """Since the proxy began, but for what it is doing now: `in_flight`, `queued`.

    `media` counts items by the form in which they went on to prefill and decode.
    `failed` counts 5xx, `rejected` 4xx, `left` 499; `refused` is admission control's part of both.
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


def totals(families: Iterable[Metric]) -> Totals:
    """Those of the page of metrics."""
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
    """A counter that has counted nothing is not on the page."""
    return Saved(
        encodes=int(sums.get(("epd_saved_encodes_total",), 0)),
        bytes=int(sums.get(("epd_saved_bytes_total",), 0)),
        encode_seconds=sums.get(("epd_saved_encode_seconds_total",), 0.0),
    )
