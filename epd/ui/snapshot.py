"""What one process knows of late, as values that go through JSON to the one that is asked.

Samples and seconds are on the monotonic clock, which is the same for all processes of a machine.
Requests and notices are on the clock on the wall: what one call of the page says of their times,
the next one says too.
"""

from typing import Literal, TypedDict

from epd.bodies.endpoints import is_api
from epd.events import ItemResult, RequestRecord, StageDone

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
