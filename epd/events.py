"""Events as values: the core emits them; observers log, count or trace them. Pure."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from epd.errors import Stage


class Histogram:
    """Histogram with fixed bounds: counts of values by bound, and the sum of the values.

    Attributes:
        bounds: upper bounds, ascending. A value counts for the first bound that is not below it.
        counts: one count for each bound, and one for values above the last bound.
        sum: sum of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merge(self, other: "Histogram") -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = [
            mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)
        ]
        self.sum += other.sum


ItemResult = Literal["hit", "encoded", "local"]
"""Source of an item's encoder output. `hit`: stored, or already being encoded. `encoded`: an encode
instance made it for this request. `local`: prefill or decode makes it, because no encode instance
could, or the policy decided so."""

MediaForm = Literal["metadata", "raw"]
"""Form of an item for prefill and decode: only its placeholder metadata, or its media."""

Degraded = Literal["encode-local", "prefill-local"]
"""Stages that were replaced by another stage, sent as `x-epd-degraded`."""

Modality = str
"""`image`, `audio` or `video`."""

Waiting = Stage | Literal["answer"]
"""Target of a request's wait: a stage, or the rest of its answer."""

GAPS_MS = (1, 2.5, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2500, 5000, 10_000)
GAPS_S = tuple(gap_ms / 1000 for gap_ms in GAPS_MS)
"""Upper bounds of the histogram of times between the chunks of a stream, in seconds."""

CLIENT_CLOSED = 499
"""Status for a client that disconnected before its answer, as nginx uses it; logged, never sent."""


class StageDone(NamedTuple):
    """Finished request to an instance, the store or the queue, successful or not.

    Attributes:
        stage: queue, store, encode, prefill, decode or release.
        instance: base URL of the instance; for the store its kind; for the queue "proxy".
        started_s: time of sending, on the monotonic clock.
        seconds: time until the answer was read. For decode's streams, until the first byte. In the
            queue, until admission.
        error: slug of the error, `cancelled`, or None.
        model_name: the instances' name of the request's model (`epd.request.model_names`).
        modality: modality of the encoded item.
        rejected: whether the request itself is invalid, so that no instance failed.
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
    """The history of a client's request. Observers receive it when the request has ended.

    Its methods append to it. Nothing else writes its fields.

    Attributes:
        request_id: the client's id of the request, or else the id sent to the instances.
        engine_id: the id sent to the instances.
        method: HTTP method.
        path: path of the route.
        tenant: name of the client's tenant; empty without `--api-keys-file`.
        trace_id: id of the trace, if the request is traced.
        started_s: arrival of the request's head, on the monotonic clock.
        status: HTTP status that was sent; 499 if the client disconnected first.
        seconds: time from the request's head to the last byte of the answer.
        error: slug of the error, or None. A stream may break after a status of 200.
        reason: the cause of the error, for the log and not for the client.
        at: what the request waits for, or waited for last.
        policy: the policy that decided the stages; None before the decision.
        stages: the finished requests to instances.
        items: number of media items, by source.
        placements: number of items by where they are encoded, `local` or `encode`, and the reason,
            if the policy decides for each item.
        media: form in which the items went on to prefill and decode, in the last attempt.
        prefix_tokens: estimated number of the prompt's tokens that were in the prefix cache of the
            instance of its prefill; None unless that is chosen by content.
        hits: number of items that needed no encode, by modality.
        waits: number of those hits that waited for an encode of another request.
        saved_bytes: bytes of their media, as in the request, that no instance received.
        retries: number of retries, invisible to the client.
        degraded: stages that were replaced by another stage.
        model_name: the instances' name of the request's model (`epd.request.model_names`).
        prefilled_s: arrival of prefill's answer, on the monotonic clock.
        first_token_s: time from the request's head to decode's first event of tokens. For an answer
            without a stream, to the end of the answer.
        kv_wait_s: in a stream, time from prefill's answer to decode's first token: upper bound of
            the time for which prefill kept the blocks.
        gaps: times between the chunks of the stream, in seconds, by `GAPS_S`.
        stream: whether the head of the answer announced a stream.
        answer_bytes: bytes of the answer's body that were written.
        ended: whether the observers have received the record, which is then final.
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
    placements: Mapping[tuple[str, str], int] = field(default_factory=dict)
    media: Mapping[MediaForm, int] = field(default_factory=dict)
    prefix_tokens: int | None = None
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

    def wait_for(self, target: Waiting) -> None:
        self.at = target

    def add_policy(self, name: str) -> None:
        self.policy = name

    def add_stage(self, event: StageDone) -> None:
        """Add a finished stage, unless the request ended before it."""
        if not self.ended:
            self.stages.append(event)

    def add_retry(self) -> None:
        self.retries += 1

    def add_degraded(self, stage: Degraded) -> None:
        self.degraded.add(stage)

    def begin_encode(self) -> None:
        self.hits, self.waits = {}, 0

    def add_placements(self, placements: Sequence[tuple[str, str]]) -> None:
        self.placements = Counter(placements)

    def add_wait(self) -> None:
        self.waits += 1

    def add_items(self, items: Sequence[tuple[ItemResult, Modality]]) -> None:
        self.items = Counter([result for result, _ in items])
        self.hits = Counter([modality for result, modality in items if result == "hit"])

    def add_media(self, metadata: int, raw: int, saved_bytes: int) -> None:
        """Add the form of the items in this attempt, in place of that in the one before."""
        self.media = {"metadata": metadata, "raw": raw}
        self.saved_bytes = saved_bytes

    def add_prefix(self, tokens: int | None) -> None:
        self.prefix_tokens = tokens

    def add_prefilled(self, now_s: float) -> None:
        self.prefilled_s = now_s

    def begin_stream(self) -> None:
        self.stream = True

    def begin_gaps(self) -> Histogram:
        """Return the empty histogram of the gaps of a stream."""
        self.gaps = Histogram(GAPS_S)
        return self.gaps

    def add_first_token(self, now_s: float) -> None:
        """Add decode's first event of tokens. Decode has read the blocks of prefill by then."""
        self.first_token_s = now_s - self.started_s
        if self.gaps is not None and self.prefilled_s is not None:
            self.kv_wait_s = now_s - self.prefilled_s

    def add_answer(self, size_bytes: int) -> None:
        self.answer_bytes += size_bytes

    def set_answer(self, size_bytes: int) -> None:
        self.answer_bytes = size_bytes

    def set_tenant(self, name: str) -> None:
        self.tenant = name

    def set_path(self, route: str) -> None:
        """Set the path of the route, if it is found after the request began."""
        self.path = route

    def end(
        self,
        now_s: float,
        status: int | None,
        error: str | None,
        reason: str | None,
        model_name: str,
    ) -> None:
        """Make the record final. The status is None if the client did not get the whole answer."""
        self.seconds = now_s - self.started_s
        if status is not None:
            self.status = status
        self.error, self.reason, self.model_name, self.ended = error, reason, model_name, True


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """A change of an instance's state or membership.

    Attributes:
        instance: base URL of the instance.
        role: role of the instance.
        state: the new health state; or `added`, `removed`, or `refused` if the instance conflicts
            with others.
        source: source of the last three states.
        cause: cause of the states `ejected` and `down`; empty for others.
    """

    instance: str
    role: str
    state: str
    source: str | None = None
    cause: str = ""


class Observer(Protocol):
    """Receives every event on the event loop. Its methods must return at once."""

    def stage_done(self, event: StageDone) -> None:
        """Handle the end of one request to an instance."""

    def request_done(self, event: RequestRecord) -> None:
        """Handle the end of a client's request."""

    def instance_changed(self, event: InstanceChanged) -> None:
        """Handle a change of an instance's health or membership."""


def stage_seconds(stages: Sequence[StageDone]) -> dict[Stage, float]:
    """Return the wall time of each stage: from its first request to its last answer."""
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
