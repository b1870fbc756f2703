"""State of a request beside its body: timing of its stages, ids, and the model's label.

Ids of requests for instances, logs and traces only distinguish requests. They are no secrets and
need no system call for secure randomness.

A client can ask for any model name. Only a name from an instance's answer becomes a label, which
bounds the number of labels. vLLM answers with the served name: the first if there are several, as
in the `model_name` label of its own metrics. For a LoRA it answers with the adapter's name.
"""

import itertools
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

from ec_store.bounded import BoundedDict
from epd.api.body import JSON, NO_CUTS, Cuts, Pieces
from epd.api.chat import CHAT
from epd.api.endpoint import Endpoint
from epd.api.items import MMItem
from epd.api.usage import Usage
from epd.config.sections import ConfigFields
from epd.conversations.turn import Turn
from epd.edge.engine_headers import SESSION
from epd.errors import ProxyError, Stage, slug_of
from epd.events import Observer, RequestRecord, StageDone
from epd.json_or_none import json_or_none
from epd.media.held_bytes import HeldBytes, UncountedBytes
from epd.routing.doubts import Doubts
from epd.routing.watched import Watched
from epd.tenants import ANONYMOUS, Tenant

if TYPE_CHECKING:
    from epd.spans import RequestSpan, Span

# A generator of its own: other code in the process may seed the module's one, and then two proxies
# would generate equal ids.
_NUMBERS = random.Random()  # noqa: S311 - no secret
os.register_at_fork(after_in_child=_NUMBERS.seed)


def request_id(client_id: str | None) -> str:
    """Return a unique id that begins with the client's id, so that a search for that id finds it.

    A client may use one id twice at the same time. An engine or a KV connector that identifies
    requests by the id would confuse two such requests.
    """
    return _hex(16) if client_id is None else f"{client_id}-{_hex(4)}"


def child_id(parent: str, number: int) -> str:
    """Return the id of a numbered request on behalf of another."""
    return f"{parent}:{number}:{_hex(3)}"


def _hex(size_bytes: int) -> str:
    return f"{_NUMBERS.getrandbits(8 * size_bytes):0{2 * size_bytes}x}"


MAX_NAMES = 64
"""Upper bound of distinct names. Further names are `OTHER`."""
MAX_ASKED = 256
"""Upper bound of requested names that are kept, the latest ones."""
MAX_LENGTH = 256
"""Maximum length of a name, in characters."""
LOOKED_AT_BYTES = 256 * 1024
"""Answers larger than this are not parsed."""

OTHER = "other"

NAME_WITHIN = ("response", "message")
"""Fields of a stream's first event that contain the answer object: OpenAI responses, Anthropic."""


class ModelNames:
    """Model names in answers, by the requested name. Belongs to one event loop."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._asked: BoundedDict[str, str] = BoundedDict(MAX_ASKED)

    def name_of(self, asked: str | None) -> str:
        """Return the instances' name of a requested model; empty if none is requested."""
        return self._asked.get(asked, OTHER) if asked else ""

    def learn_name(self, asked: str | None, answer: bytes) -> None:
        """Keep the model name of an instance's 2xx answer to a request for this model."""
        if not asked or asked in self._asked or len(asked) > MAX_LENGTH:
            return
        name = _named(answer)
        if name is None:
            return
        if len(self._names) < MAX_NAMES:
            self._names.add(name)
        self._asked[asked] = name if name in self._names else OTHER


def _named(answer: bytes) -> str | None:
    """Return the name in the answer's own `model` field.

    A client can control deeper fields: the `metadata` of a response, the arguments of a tool call.
    """
    if len(answer) > LOOKED_AT_BYTES or b'"model"' not in answer:
        return None
    start = answer.find(b"{")
    end = answer.find(b"\n", start) if start else -1  # of a stream, the first event
    event = json_or_none(answer[start : None if end < 0 else end]) or {}
    for own in (event, *map(event.get, NAME_WITHIN)):
        match own:
            case {"model": str() as name} if name.isprintable() and 0 < len(name) <= MAX_LENGTH:
                return name
    return None


WAIT = "encode wait"
"""Name of the span of an item that another request or another proxy encodes."""

WITHIN = frozenset[Stage]({"queue", "store"})
"""Stages that involve no instance."""


@dataclass(slots=True)
class RequestContext:
    """Client of a request, its settings and instance headers, and the record of its progress.

    Attributes:
        request_id: id that the instances see, unique for each request.
        headers: headers for the instances, without the request id.
        config: configuration in force at the request's arrival; it applies to the whole request.
        endpoint: the requested endpoint.
        tenant: owner of the request.
        clients_key: whether the instances receive the client's own key, and not the proxy's.
        observers: receivers of the events.
        record: the events so far.
        cuts: media cut out of the body; they are put back into the bodies for instances.
        gave_up_media: whether the media were freed for another request, which found no room. The
            proxy then does not retry this one.
        text_bytes: size of the body as received, without its media.
        held: counter of the request's bytes in memory.
        models: the instances' names of models.
        model: the client's name of the model.
        session: affinity key shared with related requests; empty for none.
        span: span of the trace; None without tracing.
        answering: span of decode, until its first event of tokens.
        client_headers: all headers of the client, case-insensitive.
        turn: the conversation turn; None for a request outside a conversation.
        watched: the request's state for counting deaths of instances.
        doubts: the request's 500s.
        prefill_usage: prefill's numbers for the client's answer; empty if decode prefilled.
    """

    request_id: str
    headers: Mapping[str, str]
    config: ConfigFields
    endpoint: Endpoint = CHAT
    tenant: Tenant = ANONYMOUS
    clients_key: bool = True
    observers: Sequence[Observer] = ()
    record: RequestRecord = field(default_factory=lambda: RequestRecord("", "POST", ""))
    cuts: Cuts = field(default_factory=dict)
    gave_up_media: bool = False
    text_bytes: int = 0
    held: HeldBytes = field(default=UncountedBytes())
    models: ModelNames = field(default_factory=ModelNames)
    model: str | None = None
    session: str = ""
    span: "RequestSpan | None" = None
    answering: "Span | None" = None
    turn: Turn | None = None
    watched: Watched = field(default_factory=Watched)
    doubts: Doubts = field(default_factory=Doubts)
    prefill_usage: Usage = field(default_factory=dict)
    client_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    _children: Iterator[int] = field(default_factory=itertools.count)

    def headers_for(
        self,
        request_id: str | None,
        span: "Span | None" = None,
        rank: int | None = None,
        content_type: str = JSON,
        *,
        mark: str = "",
    ) -> dict[str, str]:
        """Return the headers of one request to an instance, or to one of its data-parallel ranks.

        The spans of the instance become children of `span`. A mark replaces the client's session.
        Without an id, the request has that of the client's request.
        """
        own = {**self.headers, "Content-Type": content_type}
        own["X-Request-Id"] = request_id or self.request_id
        if mark:
            own[SESSION] = mark
        if rank is not None:
            own["X-data-parallel-rank"] = str(rank)
        return own if span is None else {**own, **span.headers}

    @property
    def is_spent(self) -> bool:
        """Whether no instance may get the request again, because it kills them or fails on all."""
        return self.watched.is_spent or self.doubts.is_spent

    def child_id(self) -> str:
        """Return an id for a request that the proxy makes on behalf of this one."""
        return child_id(self.request_id, next(self._children))

    def offer_media(self, sent: Pieces = ()) -> None:
        """Let another request that finds no room have the memory of the media.

        Until the offer is withdrawn, no instance needs the media, except for a retry. `sent` is a
        body with media that has been sent.
        """
        size = sum(map(len, self.cuts.values()))
        self.held.may_give_up(size, partial(self._give_up_media, sent))

    def _give_up_media(self, sent: Pieces) -> None:
        self.cuts, self.gave_up_media = NO_CUTS, True
        if isinstance(sent, list):  # the request in progress refers to it
            sent.clear()

    @property
    def model_name(self) -> str:
        return self.models.name_of(self.model)

    def learn_model(self, answer: bytes) -> None:
        """Learn the instances' name of the model from a 2xx answer."""
        self.models.learn_name(self.model, answer)

    def first_event(self, now_s: float) -> None:
        """Record decode's first event of tokens. Decode has read the blocks of prefill by then."""
        record = self.record
        record.first_token_s = now_s - record.started_s
        if record.prefilled_s is not None:
            record.kv_wait_s = now_s - record.prefilled_s
        if self.answering is not None:
            self.answering.event("first_token")
            self.answering = None

    def record_whole(self, answer: bytes) -> None:
        """Record a complete answer of decode that is no stream."""
        if self.endpoint.generates:
            self.record.first_token_s = time.monotonic() - self.record.started_s
        self.learn_model(answer)

    def time_stage(self, stage: Stage, where: str, item: MMItem | None = None) -> "Timed":
        """Return a context that emits a `StageDone` at its exit, with or without an error.

        Its span starts here if the request is traced.
        """
        return Timed(self, stage, where, item)

    def wait_span(self, item: MMItem) -> "AbstractContextManager[Span | None]":
        """Return the span of a wait for an item's encode; None as its value without tracing."""
        return nullcontext() if self.span is None else self.span.child(WAIT, item=item)

    def record_stage(self, event: StageDone) -> None:
        """Record the end of a stage, which may be after the end of the request, and emit it."""
        if not self.record.ended:
            self.record.stages.append(event)
        for observer in self.observers:
            observer.stage_done(event)


class Timed:
    """Stage of a request in progress.

    Attributes:
        span: span of the stage; None without tracing.
    """

    __slots__ = ("_context", "_item", "_stage", "_started_s", "_where", "span")

    def __init__(
        self, context: RequestContext, stage: Stage, where: str, item: MMItem | None
    ) -> None:
        self._context = context
        self._stage: Stage = stage
        self._where = where
        self._item = item
        self.span: Span | None = None
        if context.span is not None:
            endpoint = CHAT if stage == "encode" else context.endpoint
            url = None if stage in WITHIN else where + endpoint.path
            self.span = context.span.child(stage, url=url, item=item)

    def record_status(self, status: int) -> None:
        """Record the HTTP status of the instance's answer in the span."""
        if self.span is not None:
            self.span.record_status(status)

    def __enter__(self) -> Self:
        self._context.record.at = self._stage
        self._started_s = time.monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        slug, ended_s, context = slug_of(error), time.monotonic(), self._context
        if self.span is not None and (error is not None or self._stage != "decode"):
            self.span.end_span(slug)  # decode's span continues until its answer has been relayed
        context.record_stage(
            StageDone(
                self._stage,
                self._where,
                self._started_s,
                ended_s - self._started_s,
                slug,
                context.model_name,
                None if self._item is None else self._item.modality,
                rejected=isinstance(error, ProxyError) and error.rejects_request,
            )
        )
