"""Recent events of this process: an observer that keeps them, and their form as JSON values. Pure.

Samples and seconds are on the monotonic clock, which all processes of a machine share. Requests and
notices are on the wall clock, so that each response of the page shows the same times for them.
"""

import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Literal, get_args

from typing_extensions import TypedDict

from epd.api.endpoints import is_api
from epd.errors import Stage
from epd.events import CLIENT_CLOSED, InstanceChanged, ItemResult, RequestRecord, StageDone

KEPT_REQUESTS = 64
KEPT_ERRORS = 48
KEPT_CHANGES = 16
"""Upper bound of the kept changes of instances. They have a buffer of their own, so that failed
requests cannot evict the removal of an instance."""
KEPT_SAMPLES = 512
"""Upper bound of the kept samples of each stage, and of those of whole requests."""
KEPT_SECONDS = 120

SHOWN_SPANS = 16
"""Upper bound of the spans of a request: one with many images has a span for each."""
SHOWN_TEXT = 300
"""Upper bound of an error's reason, in characters."""

NO_WORK = frozenset({"/v1/models"})
"""Routes of the API that load balancers and similar clients poll."""

CLIENT_ERROR, SERVER_ERROR = 400, 500
"""Statuses of a request: from `CLIENT_ERROR` a client error, from `SERVER_ERROR` a failure."""

Outcome = Literal["ok", "rejected", "left", "failed"]
"""Result of a client request or of an upstream one.

`ok`: answered. `rejected`: the request itself is invalid (4xx). `left`: the client disconnected.
`failed`: any other error.
"""

Sample = tuple[str, float, float, Outcome]
"""Upstream request: instance, time of its end, duration in seconds, outcome."""


Answer = tuple[float, float | None, float | None]
"""Client's request: time of its end; seconds, if it was answered; seconds to the first token, if it
was a stream that came so far."""


class Second(TypedDict):
    """Counts of the requests and items that ended within one second."""

    at_s: int
    requests: int
    failed: int
    rejected: int
    hit: int
    encoded: int


def empty_second(at_s: int) -> Second:
    """Return the counts of a second in which nothing has ended."""
    return Second(at_s=at_s, requests=0, failed=0, rejected=0, hit=0, encoded=0)


class StageSpan(TypedDict):
    """Stage of a request. `after_s` is counted from the request's head."""

    stage: str
    instance: str
    after_s: float
    seconds: float
    error: str | None
    outcome: Outcome


class RecentRequest(TypedDict):
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
    `cause` is that of the states `ejected` and `down`; otherwise it is empty.
    """

    kind: Literal["request", "instance"]
    at_s: float
    what: str
    message: str
    more: str
    cause: str
    outcome: Outcome


class InstanceState(TypedDict):
    """Instance as one process sees it. `requests` counts those under way.

    `prompt_tokens` counts those of requests that came for their content, `prefix_tokens` the part
    that was expected in the prefix cache. `precise`: what the cache holds is known by KV events.
    `cause` is that of the states `ejected` and `down`; otherwise it is empty.
    `kv_bytes_per_s`: mean bandwidth of the last KV transfers that it reported; null before any.
    `writes`: it reports that it writes what it encodes to the store.
    """

    role: str
    url: str
    state: str
    cause: str
    requests: int
    prompt_tokens: int
    prefix_tokens: int
    precise: bool
    kv_bytes_per_s: float | None
    writes: bool


class Snapshot(TypedDict):
    """State of one process, and its recent events, oldest first."""

    instances: list[InstanceState]
    samples: dict[str, list[Sample]]
    answers: list[Answer]
    seconds: list[Second]
    requests: list[RecentRequest]
    notices: list[Notice]


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


class Recent:
    """Recent events of this process. All buffers are bounded, and an event costs an append.

    Requests and notices take their time from the wall clock once, when they happen: the page uses
    it as part of their keys.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._unix_clock = unix_clock
        self._stages: dict[Stage, deque[StageDone]] = {
            stage: deque(maxlen=KEPT_SAMPLES) for stage in get_args(Stage)
        }
        self._answers: deque[Answer] = deque(maxlen=KEPT_SAMPLES)
        self._requests: deque[tuple[float, float, RequestRecord]] = deque(maxlen=KEPT_REQUESTS)
        self._errors: deque[tuple[float, RequestRecord]] = deque(maxlen=KEPT_ERRORS)
        self._changes: deque[tuple[float, InstanceChanged]] = deque(maxlen=KEPT_CHANGES)
        self._seconds: deque[Second] = deque(maxlen=KEPT_SECONDS)

    def stage_done(self, event: StageDone) -> None:
        self._stages[event.stage].append(event)

    def request_done(self, event: RequestRecord) -> None:
        """Keep a client request, unless it is for an operator route."""
        if not is_work(event.path):
            return
        now_s, unix_s = self._clock(), round(self._unix_clock(), 3)
        self._requests.append((now_s, unix_s, event))
        answered_s = event.seconds if event.error is None else None
        first_token_s = event.first_token_s if event.stream else None
        if answered_s is not None or first_token_s is not None:
            self._answers.append((now_s, answered_s, first_token_s))
        second = self._second(int(now_s))
        second["requests"] += 1
        if event.error is not None:
            self._errors.append((unix_s, event))
            outcome = outcome_of(event)
            second["failed"] += outcome == "failed"
            second["rejected"] += outcome == "rejected"
        if event.items:
            second["hit"] += event.items.get("hit", 0)
            second["encoded"] += event.items.get("encoded", 0) + event.items.get("local", 0)

    def instance_changed(self, event: InstanceChanged) -> None:
        self._changes.append((round(self._unix_clock(), 3), event))

    def _second(self, at: int) -> Second:
        if not self._seconds or self._seconds[-1]["at_s"] != at:
            self._seconds.append(empty_second(at))
        return self._seconds[-1]

    def snapshot(self, instances: list[InstanceState]) -> Snapshot:
        """Return these instances and all kept events, in a form that other processes can read."""
        return Snapshot(
            instances=instances,
            samples={
                stage: [
                    (
                        sample.instance,
                        sample.started_s + sample.seconds,
                        sample.seconds,
                        stage_outcome_of(sample),
                    )
                    for sample in ring
                ]
                for stage, ring in self._stages.items()
                if ring
            },
            answers=list(self._answers),
            seconds=list(self._seconds),
            requests=[_request(*request) for request in self._requests],
            notices=[
                *(_notice(*error) for error in self._errors),
                *(_notice(*change) for change in self._changes),
            ],
        )


def _request(now_s: float, ended_s: float, event: RequestRecord) -> RecentRequest:
    began_s = now_s - event.seconds
    return RecentRequest(
        id=event.request_id,
        engine_id=event.engine_id,
        path=event.path,
        status=event.status,
        ended_s=ended_s,
        seconds=round(event.seconds, 5),
        error=event.error,
        outcome=outcome_of(event),
        items={**event.items},
        retries=event.retries,
        degraded=sorted(event.degraded),
        spans=[_span(began_s, stage) for stage in islice(event.stages, SHOWN_SPANS)],
        more_spans=max(0, len(event.stages) - SHOWN_SPANS),
    )


def _span(began_s: float, event: StageDone) -> StageSpan:
    return StageSpan(
        stage=event.stage,
        instance=event.instance,
        after_s=round(max(0.0, event.started_s - began_s), 5),
        seconds=round(event.seconds, 5),
        error=event.error,
        outcome=stage_outcome_of(event),
    )


def _notice(at_s: float, event: RequestRecord | InstanceChanged) -> Notice:
    if isinstance(event, InstanceChanged):
        return Notice(
            kind="instance",
            at_s=at_s,
            what=event.instance,
            message=event.state,
            more=event.role,
            cause=event.cause,
            outcome="ok",
        )
    return Notice(
        kind="request",
        at_s=at_s,
        what=event.request_id,
        message=event.error or "",
        more=f"{event.status} {event.reason or ''}".rstrip()[:SHOWN_TEXT],
        cause="",
        outcome=outcome_of(event),
    )
