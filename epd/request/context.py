"""What a request carries through its stages beside its body, and how each of them is timed."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from epd.bodies.chat import CHAT
from epd.bodies.cuts import Cuts
from epd.bodies.endpoint import Endpoint
from epd.bodies.items import MMItem
from epd.bodies.parsing import JSON
from epd.config import ProxyConfig
from epd.conversations.turn import Turn
from epd.errors import ProxyError, Stage, slug_of
from epd.events import Observer, RequestRecord, StageDone
from epd.media.held import Held, Uncounted
from epd.models import ModelNames
from epd.request.ids import child_id
from epd.routing.fatal import Watched
from epd.spans import RequestSpan, Span
from epd.tenants import ANONYMOUS, Tenant

WITHIN = frozenset[Stage]({"queue", "store"})
"""Stages in which no instance is asked."""


def _unnamed() -> RequestRecord:
    return RequestRecord("", "POST", "")


@dataclass(slots=True)
class RequestContext:
    """Who asks for what, and how its instances are asked.

    Attributes:
        request_id: the id its instances see; no two requests have the same.
        headers: headers its instances are sent, but for the request id.
        config: the configuration that was in force when it came, by which it goes to its end.
        endpoint: what it asks for.
        tenant: whose request it is.
        clients_key: whether the instances judge the client's own key, and not the proxy's.
        observers: who is told what happens.
        record: what has happened so far.
        cuts: what was cut out of its body, and is put back into those for its instances.
        held: what counts its bytes in memory.
        models: what instances call which model.
        model: what the client calls the one it asks for.
        session: what it belongs together with others by; empty: nothing.
        span: what it is traced by, where it is traced.
        answering: decode's span, until its first event of tokens.
        client_headers: all headers of its client, by name in any case.
        turn: the conversation's, of which it is one; None: of none.
        watched: the request as the deaths of its instances are counted.
    """

    request_id: str
    headers: Mapping[str, str]
    config: ProxyConfig
    endpoint: Endpoint = CHAT
    tenant: Tenant = ANONYMOUS
    clients_key: bool = True
    observers: Sequence[Observer] = ()
    record: RequestRecord = field(default_factory=_unnamed)
    cuts: Cuts = field(default_factory=dict)
    held: Held = field(default_factory=Uncounted)
    models: ModelNames = field(default_factory=ModelNames)
    model: str | None = None
    session: str = ""
    span: RequestSpan | None = None
    answering: Span | None = None
    turn: Turn | None = None
    watched: Watched = field(default_factory=Watched)
    client_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    _children: Iterator[int] = field(default_factory=itertools.count)

    def headers_for(
        self,
        request_id: str,
        span: Span | None = None,
        rank: int | None = None,
        content_type: str = JSON,
    ) -> dict[str, str]:
        """Headers of one request to an instance, or to one of its data-parallel ranks.

        The instance's own spans are children of `span`.
        """
        own = {**self.headers, "Content-Type": content_type, "X-Request-Id": request_id}
        if rank is not None:
            own["X-data-parallel-rank"] = str(rank)
        return own if span is None else {**own, **span.headers}

    def child_id(self) -> str:
        """An id for a request that is made on behalf of this one."""
        return child_id(self.request_id, next(self._children))

    @property
    def model_name(self) -> str:
        """What instances call its model."""
        return self.models.of(self.model)

    def named(self, answer: bytes) -> None:
        """Learn from an instance's 2xx what it calls the model."""
        self.models.learn(self.model, answer)

    def first_event(self, now_s: float) -> None:
        """Decode has begun with its tokens: it has what prefill kept for it."""
        record = self.record
        record.first_token_s = now_s - record.started_s
        if record.prefilled_s is not None:
            record.kv_wait_s = now_s - record.prefilled_s
        if self.answering is not None:
            self.answering.event("first_token")
            self.answering = None

    def whole(self, answer: bytes) -> None:
        """Decode has answered, with no stream."""
        if self.endpoint.generates:
            self.record.first_token_s = time.monotonic() - self.record.started_s
        self.named(answer)

    def timed(self, stage: Stage, where: str, item: MMItem | None = None) -> "Timed":
        """Emit a `StageDone` when the context is left, however it is left.

        Its span begins here, where the request is traced.
        """
        return Timed(self, stage, where, item)

    def done(self, event: StageDone) -> None:
        """Something of it has ended, which may be after the request."""
        if not self.record.ended:
            self.record.stages.append(event)
        for observer in self.observers:
            observer.stage_done(event)


class Timed:
    """One stage of a request, under way.

    Attributes:
        span: its span, where the request is traced.
    """

    __slots__ = ("_context", "_modality", "_stage", "_started_s", "_where", "span")

    def __init__(
        self, context: RequestContext, stage: Stage, where: str, item: MMItem | None
    ) -> None:
        self._context = context
        self._stage: Stage = stage
        self._where = where
        self._modality = None if item is None else item.modality
        self.span: Span | None = None
        if context.span is not None:
            endpoint = CHAT if stage == "encode" else context.endpoint
            url = None if stage in WITHIN else where + endpoint.path
            self.span = context.span.child(stage, url=url, item=item)

    def __enter__(self) -> Span | None:
        """It begins."""
        self._context.record.at = self._stage
        self._started_s = time.monotonic()
        return self.span

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It has ended, and how."""
        slug, ended_s, context = slug_of(error), time.monotonic(), self._context
        if self.span is not None and (error is not None or self._stage != "decode"):
            self.span.end(slug)  # decode's goes on until its answer has been relayed
        context.done(
            StageDone(
                self._stage,
                self._where,
                self._started_s,
                ended_s - self._started_s,
                slug,
                context.model_name,
                self._modality,
                rejected=isinstance(error, ProxyError) and error.rejects_request,
            )
        )
