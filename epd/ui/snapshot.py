"""What one process knows of late, as values that go through JSON to the one that is asked.

Times are on the monotonic clock, which is the same for all processes of a machine.
"""

from typing import Literal, TypedDict

from epd.events import ItemResult

KEPT_REQUESTS = 64
KEPT_ERRORS = 48
KEPT_CHANGES = 16
"""Of instances. Their own, so that no client's bad requests push out an instance that went."""
KEPT_SAMPLES = 512
"""For each stage."""
KEPT_SECONDS = 120

NO_WORK = frozenset({"/v1/models"})
"""Of the API: asked for by load balancers and such, again and again."""

Sample = tuple[str, float, float, bool]
"""Of one request to an instance: the instance, when it ended, how long it took, if it failed."""


class Second(TypedDict):
    """What ended in one second that something ended in."""

    at_s: int
    requests: int
    failed: int
    hit: int
    encoded: int


class Span(TypedDict):
    """One stage of a request; `after_s` from the request's head."""

    stage: str
    instance: str
    after_s: float
    seconds: float
    error: str | None


class Request(TypedDict):
    """A client's request that has ended."""

    id: str
    engine_id: str
    path: str
    status: int
    ended_s: float
    seconds: float
    error: str | None
    items: dict[ItemResult, int]
    retries: int
    degraded: list[str]
    spans: list[Span]
    more_spans: int


class Notice(TypedDict):
    """A request that failed, its error and what lies behind it; or an instance that changed.

    Of an instance it says its URL, its new state and its role.
    """

    kind: Literal["request", "instance"]
    at_s: float
    what: str
    said: str
    more: str


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


def is_work(path: str) -> bool:
    """Whether requests of a route are shown: those that instances work for."""
    return path.startswith("/v1/") and path not in NO_WORK
