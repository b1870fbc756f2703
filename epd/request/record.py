"""What has happened to a request so far: told to the observers at its end."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from epd.events import Degraded, ItemResult, Modality, StageDone, Waiting
from epd.histogram import Histogram


@dataclass(slots=True)
class Record:
    """Of one request; whoever does something for it writes down what.

    Attributes:
        at: what it waits for, or did last.
        stages: those that have ended; each adds itself.
        policy: the one that decided what runs; None: none has.
        items: how many items came from where.
        hits: how many of its items needed no encode, by modality.
        waits: how many of those waited for an encode that somebody else had begun.
        saved_bytes: of their media that no instance was sent.
        retries: how often the request was begun anew.
        degraded: what was done in another stage than its own.
        prefilled_s: when prefill had answered, on the monotonic clock.
        first_event_s: when decode's first event of tokens came, on the monotonic clock; where the
            answer is of tokens and no stream, when all of it had come.
        kv_wait_s: from prefill's answer until that event, in a stream.
        gaps: times between the chunks of its stream.
        streamed_bytes: of its stream, written to the client's connection.
    """

    at: Waiting = "proxy"
    stages: list[StageDone] = field(default_factory=list)
    policy: str | None = None
    items: Mapping[ItemResult, int] = field(default_factory=dict)
    hits: Mapping[Modality, int] = field(default_factory=dict)
    waits: int = 0
    saved_bytes: int = 0
    retries: int = 0
    degraded: set[Degraded] = field(default_factory=set)
    prefilled_s: float | None = None
    first_event_s: float | None = None
    kv_wait_s: float | None = None
    gaps: Histogram | None = None
    streamed_bytes: int = 0
