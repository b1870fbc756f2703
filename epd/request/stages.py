"""Encode, prefill, decode and release: one stage each, as requests to instances."""

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType

from epd.bodies.chat import CHAT, encode_body
from epd.bodies.cuts import Cuts
from epd.bodies.endpoint import JSON, Endpoint, written
from epd.bodies.items import Body, MMItem
from epd.bodies.transfer import NIXL_PREFILL, Encoded, Params, read_encoded, read_prefilled
from epd.config import ProxyConfig
from epd.errors import (
    ProxyError,
    Stage,
    UpstreamBusy,
    UpstreamDenied,
    UpstreamFailed,
    UpstreamRejected,
    said_retry_after_s,
    slug_of,
)
from epd.events import (
    Degraded,
    ItemResult,
    Modality,
    Observer,
    StageDone,
    Waiting,
)
from epd.histogram import Histogram
from epd.http.upstream import Answer, Reply, Upstream
from epd.models import ModelNames
from epd.routing.health import BUSY
from epd.routing.instances import Instance
from epd.spans import RequestSpan, Span
from epd.tenants import ANONYMOUS, Tenant

MAX_STATUS = 599

WITHIN = frozenset[Stage]({"queue", "store"})
"""Stages in which no instance is asked."""

RELEASE_TIMEOUT_S = 5.0
"""A decode instance's answer to a request that nobody waits for."""


@dataclass(slots=True)
class RequestContext:
    """What a request carries through its stages beside its body.

    Attributes:
        request_id: the id its instances see; no two requests have the same.
        headers: headers its instances are sent, but for the request id.
        endpoint: what it asks for.
        tenant: whose request it is.
        clients_key: whether the instances judge the client's own key, and not the proxy's.
        observers: who is told what happens.
        stages: what has happened so far; each stage adds to it.
        items: how many items came from where.
        retries: how often the request was begun anew.
        degraded: what was done in another stage than its own.
        client_id: what its client calls it, where it calls it anything.
        cuts: what was cut out of its body, and is put back into those for its instances.
        prefilled_s: when prefill had answered, on the monotonic clock.
        kv_wait_s: from then until decode's first event, in a stream.
        models: what instances call which model.
        model: what the client calls the one it asks for.
        at: what it waits for, or did last.
        first_event_s: when decode's first event of tokens came, on the monotonic clock; where the
            answer is of tokens and no stream, when all of it had come.
        gaps: times between the chunks of its stream.
        hits: how many of its items needed no encode, by modality.
        waits: how many of those waited for an encode that somebody else had begun.
        saved_bytes: of their media that no instance was sent.
        span: what it is traced by, where it is traced.
        answering: decode's span, until its first event.
    """

    request_id: str
    headers: Mapping[str, str]
    endpoint: Endpoint = CHAT
    tenant: Tenant = ANONYMOUS
    clients_key: bool = True
    observers: Sequence[Observer] = ()
    stages: list[StageDone] = field(default_factory=list)
    items: Mapping[ItemResult, int] = field(default_factory=dict)
    retries: int = 0
    degraded: set[Degraded] = field(default_factory=set)
    client_id: str | None = None
    cuts: Cuts = field(default_factory=dict)
    prefilled_s: float | None = None
    kv_wait_s: float | None = None
    models: ModelNames = field(default_factory=ModelNames)
    model: str | None = None
    at: Waiting = "proxy"
    first_event_s: float | None = None
    gaps: Histogram | None = None
    hits: Mapping[Modality, int] = field(default_factory=dict)
    waits: int = 0
    saved_bytes: int = 0
    span: RequestSpan | None = None
    answering: Span | None = None
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
        return f"{self.request_id}:{next(self._children)}:{secrets.token_hex(3)}"

    @property
    def model_name(self) -> str:
        """What instances call its model."""
        return self.models.of(self.model)

    def named(self, answer: bytes) -> None:
        """Learn from an instance's 2xx what it calls the model."""
        self.models.learn(self.model, answer)

    def first_event(self, now_s: float) -> None:
        """Decode has begun with its tokens: it has what prefill kept for it."""
        self.first_event_s = now_s
        if self.prefilled_s is not None:
            self.kv_wait_s = now_s - self.prefilled_s
        if self.answering is not None:
            self.answering.event("first_token")
            self.answering = None

    def whole(self, answer: bytes) -> None:
        """Decode has answered, with no stream."""
        if self.endpoint.generates:
            self.first_event_s = time.monotonic()
        self.named(answer)

    def timed(self, stage: Stage, where: str, item: MMItem | None = None) -> "Timed":
        """Emit a `StageDone` when the context is left, however it is left.

        Its span begins here, where the request is traced.
        """
        return Timed(self, stage, where, item)

    def done(self, event: StageDone) -> None:
        """Something of it has ended."""
        self.stages.append(event)
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
        self._context.at = self._stage
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
            )
        )


class Stages:
    """The three stages, over one upstream."""

    def __init__(self, upstream: Upstream, config: ProxyConfig) -> None:
        self._upstream = upstream
        self._config = config

    async def encode(
        self,
        instance: Instance,
        body: Body,
        item: MMItem,
        uuid: str | None,
        context: RequestContext,
    ) -> Encoded:
        """Encode one item.

        Raises:
            ProxyError: the instance failed, or refused it.
        """
        with context.timed("encode", instance.url, item) as span:
            answer = await self._upstream.fetch(
                instance.url + CHAT.path,
                stage="encode",
                headers=context.headers_for(context.child_id(), span),
                body=written(encode_body(body, item, uuid), context.cuts),
                timeout_s=self._config.encode_timeout_s,
            )
            if span is not None:
                span.answered(answer.status)
            accepted = _accepted(answer, "encode", context)
            context.named(accepted)
            return read_encoded(accepted, item.modality)

    async def prefill(
        self, instance: Instance, body: Body, context: RequestContext, rank: int | None = None
    ) -> Params:
        """Prefill the request and return its `kv_transfer_params`, which serve one decode.

        Raises:
            ProxyError: the instance failed, or returned none.
        """
        endpoint = context.endpoint
        with context.timed("prefill", instance.url) as span:
            answer = await self._upstream.fetch(
                instance.url + endpoint.path,
                stage="prefill",
                headers=context.headers_for(context.request_id, span, rank),
                body=endpoint.written(endpoint.prefill(body, NIXL_PREFILL), context.cuts),
                timeout_s=self._config.prefill_timeout_s,
            )
            if span is not None:
                span.answered(answer.status)
            accepted = _accepted(answer, "prefill", context)
            context.named(accepted)
            params = read_prefilled(accepted)
        context.prefilled_s = time.monotonic()
        return params

    def decode(
        self, instance: Instance, body: Body, context: RequestContext, rank: int | None = None
    ) -> "Decoding":
        """Open the decode answer. The context is entered once the instance has said 2xx.

        Raises:
            UpstreamRejected: the instance said anything else.
            ProxyError: the instance failed.
        """
        endpoint, timed = context.endpoint, context.timed("decode", instance.url)
        opening = self._upstream.open(
            instance.url + endpoint.path,
            stage="decode",
            headers=context.headers_for(
                context.request_id, timed.span, rank, endpoint.content_type(body)
            ),
            body=endpoint.written(body, context.cuts),
            head_timeout_s=self._config.first_byte_timeout_s,
        )
        return Decoding(opening, timed, context, self._config.idle_timeout_s)

    async def release(self, instance: Instance, body: Body, context: RequestContext) -> None:
        """Tell decode of a prefill that nobody waits for any more.

        It then tells the prefill instance, which would else keep the request's KV blocks until
        their lease ends (vLLM's NIXL connector, `request_finished`; `kv_lease_duration`, in older
        versions `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`). One token is asked for; leaving at the
        answer's head aborts the rest.

        Raises:
            ProxyError: it could not be told.
        """
        endpoint = context.endpoint
        with context.timed("release", instance.url) as span:
            async with self._upstream.open(
                instance.url + endpoint.path,
                stage="release",
                headers=context.headers_for(context.child_id(), span),
                body=endpoint.written(endpoint.release(body), context.cuts),
                head_timeout_s=RELEASE_TIMEOUT_S,
            ) as reply:
                # An engine that fails it has had it, and has told prefill.
                if not reply.ok and reply.status != HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise UpstreamFailed(
                        f"the decode instance answered {reply.status}",
                        slug="release_failed",
                        stage="release",
                    )


class Decoding:
    """A decode request: see `Stages.decode`."""

    __slots__ = ("_context", "_idle_s", "_opening", "_timed")

    def __init__(
        self,
        opening: AbstractAsyncContextManager[Reply],
        timed: Timed,
        context: RequestContext,
        idle_s: float,
    ) -> None:
        self._opening = opening
        self._timed = timed
        self._context = context
        self._idle_s = idle_s

    async def __aenter__(self) -> Reply:
        """The answer, its head read."""
        with self._timed as span:
            reply = await self._opening.__aenter__()
            if span is not None:
                span.answered(reply.status)
                span.event("head")
            if reply.ok:
                self._context.at = "answer"
                self._context.answering = span
                return reply
            async with AsyncExitStack() as stack:
                stack.push_async_exit(self._opening)
                said = await reply.read(idle_s=self._idle_s)
            raise _refusal(reply.status, said, reply.headers, self._context)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        if self._timed.span is not None:
            self._timed.span.end(slug_of(error))
        await self._opening.__aexit__(kind, error, trace)


def _refusal(
    status: int, said: bytes, headers: Mapping[str, str], context: RequestContext
) -> ProxyError:
    """Decode's errors are the client's, whatever their status; what is no error is decode's."""
    if HTTPStatus.BAD_REQUEST <= status <= MAX_STATUS:
        return _denied(status, "decode", context) or UpstreamRejected(
            status, said, stage="decode", headers=headers
        )
    return UpstreamFailed(
        f"the decode instance answered {status}", slug="decode_bad_response", stage="decode"
    )


def _accepted(answer: Answer, stage: Stage, context: RequestContext) -> bytes:
    """The body of a 2xx answer; an error for any other."""
    if answer.ok:
        return answer.body
    if answer.status in BUSY:
        raise UpstreamBusy(
            f"the {stage} instances have too much to do",
            slug=f"{stage}_overloaded",
            stage=stage,
            retry_after_s=said_retry_after_s(answer.headers),
        )
    if answer.status // 100 == 4:  # noqa: PLR2004
        raise _denied(answer.status, stage, context) or UpstreamRejected(
            answer.status, answer.body, stage=stage, headers=answer.headers
        )
    raise UpstreamFailed(
        f"the {stage} instance answered {answer.status}",
        slug=f"{stage}_failed",
        stage=stage,
        answered=answer.status,
    )


def _denied(status: int, stage: Stage, context: RequestContext) -> UpstreamDenied | None:
    """An error of the operator's, where the key that an instance refused is not the client's."""
    if context.clients_key or status not in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return None
    return UpstreamDenied(
        f"the {stage} instance refused the proxy's key", slug=f"{stage}_auth", stage=stage
    )
