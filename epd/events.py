"""What happened, as values. The core emits them; observers log, count or trace them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from epd.errors import Stage
from epd.histogram import Histogram

ItemResult = Literal["hit", "encoded", "local"]
"""Where an item's encoder output comes from: it was there or on its way, an encode instance made it
for this request, or prefill or decode make it themselves because no encode instance could."""


MediaForm = Literal["metadata", "raw"]
"""How an item goes on to prefill and decode: as placeholder metadata alone, or with its media."""


Degraded = Literal["encode-local", "prefill-local"]
"""What another instance did than the one whose stage it is: `x-epd-degraded`."""


Modality = str
"""image, audio or video."""

Waiting = Stage | Literal["answer"]
"""What a request waits for: a stage, or the rest of its answer."""

GAPS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    5,
    10,
)
"""Upper bounds by which times between the chunks of a stream are counted."""


CLIENT_CLOSED = 499
"""nginx's status for a client that left before its answer; logged, never sent."""


class StageDone(NamedTuple):
    """One request to an instance has been answered, or has failed.

    Attributes:
        stage: queue, store, encode, prefill, decode or release.
        instance: base URL of the instance; of the store, what kind it is; of the queue, "proxy".
        started_s: when it was sent, on the monotonic clock.
        seconds: until its answer was read; for decode's streams until their first byte came; in the
            queue until the request's turn came.
        error: slug of the error, `cancelled`, or None.
        model_name: what instances call the request's model (`epd.models`).
        modality: of the item that was encoded.
        rejected: whether the error is the request's own, so that no instance failed.
    """

    stage: Stage
    instance: str
    started_s: float
    seconds: float
    error: str | None
    model_name: str = ""
    modality: Modality | None = None
    rejected: bool = False


@dataclass(slots=True)
class RequestRecord:
    """A client's request: what has happened to it. Observers are given it when it has ended.

    Attributes:
        request_id: what the client calls it, or the id sent to the instances.
        engine_id: the id sent to the instances.
        method: HTTP method.
        path: path of the route.
        tenant: name of the client's tenant; empty without `--api-keys-file`.
        trace_id: of its trace, where it is traced.
        started_s: when its head had come, on the monotonic clock.
        status: HTTP status that was sent; 499 where the client left first.
        seconds: from the request's head to the last byte of the answer.
        error: slug of the error, or None. A stream may break after a status of 200.
        reason: what lies behind the error; for the log, not for the client.
        at: what it waits for, or waited for last.
        policy: the one that decided what runs for it; None: none has.
        stages: what was asked of the instances and has ended.
        items: how many media items came from where.
        media: in which form its items went on to prefill and decode, in the last attempt.
        hits: how many of its items needed no encode, by modality.
        waits: how many of those waited for an encode that somebody else had begun.
        saved_bytes: of their media, as they stood in the request, that no instance was sent.
        retries: how often the request was begun anew, unseen by the client.
        degraded: what was done in another stage than its own.
        model_name: what instances call its model (`epd.models`).
        prefilled_s: when prefill had answered, on the monotonic clock.
        first_token_s: from its head to decode's first event of tokens; where such an answer is no
            stream, to all of it.
        kv_wait_s: from prefill's answer to decode's first token, in a stream: for so long prefill
            kept its blocks at most.
        gaps: times between the chunks of its stream, in seconds, by `GAPS_S`.
        stream: whether the answer's head announced a stream.
        answer_bytes: bytes of the answer's body, as far as it was written.
        ended: whether the observers have been given it: it changes no more.
    """

    request_id: str
    method: str
    path: str
    engine_id: str = ""
    tenant: str = ""
    trace_id: str | None = None
    started_s: float = 0.0
    status: int = CLIENT_CLOSED
    seconds: float = 0.0
    error: str | None = None
    reason: str | None = None
    at: Waiting = "proxy"
    policy: str | None = None
    stages: list[StageDone] = field(default_factory=list)
    items: Mapping[ItemResult, int] = field(default_factory=dict)
    media: Mapping[MediaForm, int] = field(default_factory=dict)
    hits: Mapping[Modality, int] = field(default_factory=dict)
    waits: int = 0
    saved_bytes: int = 0
    retries: int = 0
    degraded: set[Degraded] = field(default_factory=set)
    model_name: str = ""
    prefilled_s: float | None = None
    first_token_s: float | None = None
    kv_wait_s: float | None = None
    gaps: Histogram | None = None
    stream: bool = False
    answer_bytes: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """An instance is thought to be something else than before, has come, or has gone.

    Attributes:
        instance: its base URL.
        role: its role.
        state: what it is thought to be now; `added`, `removed`, or `refused` where it clashes with
            others.
        source: who said so, of the last three.
    """

    instance: str
    role: str
    state: str
    source: str | None = None


class Observer(Protocol):
    """Is told of every event, on the event loop: it must return at once."""

    def stage_done(self, event: StageDone) -> None:
        """One request to an instance has ended."""

    def request_done(self, event: RequestRecord) -> None:
        """A client's request has ended."""

    def instance_changed(self, event: InstanceChanged) -> None:
        """An instance was ejected, is down, or is back; or takes part, or does no more."""


def stage_seconds(stages: Sequence[StageDone]) -> dict[Stage, float]:
    """Wall time of each stage: from its first request sent to its last answer."""
    if len(stages) == 1:
        return {stages[0].stage: stages[0].seconds}
    spans: dict[Stage, tuple[float, float]] = {}
    for event in stages:
        start, end = event.started_s, event.started_s + event.seconds
        if event.stage in spans:
            first, last = spans[event.stage]
            start, end = min(first, start), max(last, end)
        spans[event.stage] = (start, end)
    return {stage: last - first for stage, (first, last) in spans.items()}
