"""Encode, prefill, decode and release: one stage each, as requests to instances."""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

import orjson

from epd.bodies.chat import CHAT
from epd.bodies.endpoint import is_stream, written
from epd.bodies.engine_errors import engine_died, may_be_fetch
from epd.bodies.items import Body, MMItem
from epd.config import ProxyConfig
from epd.edge.engine_headers import PRIORITY
from epd.errors import (
    BUSY,
    MediaFetchFailed,
    ProxyError,
    Stage,
    UpstreamBusy,
    UpstreamDenied,
    UpstreamDied,
    UpstreamFailed,
    UpstreamRejected,
    UpstreamTimeout,
)
from epd.request.context import RequestContext
from epd.routing.instances import Instance
from epd.spans import Span
from epd.transfer.encoded import Consumed, Encoded, read_encoded
from epd.transfer.kv import KVTransfer, Pair
from epd.transfer.params import Params, reply_field
from epd.upstream.client import Upstream
from epd.upstream.reply import Answer, Reply
from epd.upstream_text import said_retry_after_s

MAX_STATUS = 599

MAX_DECODE_BYTES = 256 * 1024**2
"""Largest answer of decode that is no stream."""

QUESTION_TIMEOUT_S = 2.0
"""What an instance is asked on the way to its prefill."""

RELEASE_TIMEOUT_S = 5.0
"""A decode instance's answer to a request that nobody waits for."""


class Prefilled(NamedTuple):
    """What prefill has replied.

    Attributes:
        replied: its `kv_transfer_params`; empty where there are none.
        params: those of the decode request; None: it has none.
    """

    replied: Params
    params: Params | None


class Opened(NamedTuple):
    """An answer of decode.

    Attributes:
        reply: its head, and its body as it comes.
        span: of the request to decode, until the answer has been relayed; None: not traced.
    """

    reply: Reply
    span: Span | None


class Stages:
    """The three stages, over one upstream."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def encode(
        self, instance: Instance, body: Body, item: MMItem, context: RequestContext
    ) -> Encoded:
        """Encode one item.

        Args:
            instance: who encodes.
            body: the encode request.
            item: what it is of.
            context: the request's.

        Raises:
            ProxyError: the instance failed, or refused it.
        """
        with context.timed("encode", instance.url, item) as span:
            headers = context.headers_for(context.child_id(), span)
            headers.pop(PRIORITY, None)  # one encode serves all requests with this item
            try:
                answer = await self._upstream.fetch(
                    instance.url + CHAT.path,
                    stage="encode",
                    headers=headers,
                    body=written(body, context.cuts),
                    timeout_s=context.config.encode_timeout_s,
                )
            except UpstreamTimeout as error:
                if item.remote:  # its host may be as late as the instance
                    raise _fetch_failed("encode") from error
                raise
            if span is not None:
                span.answered(answer.status)
            accepted = _accepted(answer, "encode", context, fetches=item.remote)
            context.named(accepted)
            return read_encoded(accepted, item.modality)

    async def prefill(
        self,
        transfer: KVTransfer,
        pair: Pair,
        sent: Consumed,
        context: RequestContext,
    ) -> Prefilled:
        """Prefill the request, for one decode.

        Args:
            transfer: how decode gets the KV blocks.
            pair: who prefills, and for whom.
            sent: the request.
            context: the request's.

        Raises:
            ProxyError: the instance failed, or said nothing of its blocks where it has to.
        """
        endpoint, instance = context.endpoint, pair.prefill
        asked = endpoint.prefill(sent.body, transfer.prefill_params(pair))
        with context.timed("prefill", instance.url) as span:
            answer = await self._upstream.fetch(
                instance.url + endpoint.path,
                stage="prefill",
                headers=context.headers_for(transfer.request_id(pair), span, pair.prefill_rank),
                body=endpoint.written(asked, context.cuts),
                timeout_s=context.config.prefill_timeout_s,
            )
            if span is not None:
                span.answered(answer.status)
            accepted = _accepted(answer, "prefill", context, fetches=sent.fetches)
            context.named(accepted)
            replied = reply_field(accepted, "kv_transfer_params", stage="prefill")
            params = transfer.decode_params(pair, replied)
        context.record.prefilled_s = time.monotonic()
        return Prefilled(replied, params)

    async def decode(  # noqa: PLR0913 - a request to an instance, and what is told of it
        self,
        instance: Instance,
        sent: Consumed,
        context: RequestContext,
        rank: int | None = None,
        request_id: str | None = None,
        *,
        on_head: Callable[[], None] | None = None,
    ) -> Opened:
        """Open decode's answer: its status is 2xx, and its body has begun.

        An answer that is no stream is read to its end.

        Args:
            instance: the decode instance.
            sent: the request.
            context: the request's.
            rank: the instance's data-parallel rank; None: the instance sees to it.
            request_id: the id that it sees; None: the request's.
            on_head: is called when a head with a 2xx has come, before the wait for the body.

        Raises:
            UpstreamRejected: the instance said anything else.
            ProxyError: the instance failed.
        """
        endpoint, body, idle_s = context.endpoint, sent.body, context.config.idle_timeout_s
        with context.timed("decode", instance.url) as span:
            reply = await self._upstream.open(
                instance.url + endpoint.path,
                stage="decode",
                headers=context.headers_for(
                    request_id or context.request_id, span, rank, endpoint.content_type(body)
                ),
                body=endpoint.written(body, context.cuts),
                head_timeout_s=_head_timeout_s(body, context.config),
            )
            if span is not None:
                span.answered(reply.status)
                span.event("head")
            if not reply.ok:
                with reply:
                    said = await reply.read(idle_s=idle_s)
                answer = Answer(reply.status, reply.headers, said)
                raise _refusal(answer, context, fetches=sent.fetches)
            if on_head is not None:
                on_head()
            # Until the first byte of a stream, and the last one of any other answer, the client has
            # seen nothing, and another instance can do it.
            try:
                if reply.is_stream:
                    await reply.begun(idle_s)
                else:
                    await reply.read(idle_s=idle_s, limit=MAX_DECODE_BYTES)
            except BaseException:
                reply.close()
                raise
            context.record.at = "answer"
            context.answering = span
            return Opened(reply, span)

    async def tokens(
        self, instance: Instance, question: Body, context: RequestContext
    ) -> list[int]:
        """The tokens of a prompt, as an instance makes them of it (`POST /tokenize`).

        Raises:
            ProxyError: it did not say them.
        """
        answer = await self._upstream.fetch(
            instance.url + "/tokenize",
            stage="prefill",
            headers=context.headers_for(context.child_id()),
            body=written(question, context.cuts),
            timeout_s=QUESTION_TIMEOUT_S,
        )
        try:
            said = orjson.loads(answer.body) if answer.ok else None
        except orjson.JSONDecodeError:
            said = None
        match said:
            case {"tokens": list() as tokens}:
                return tokens
        raise UpstreamFailed(
            "the prefill instance does not tell tokens", slug="prefill_no_tokens", stage="prefill"
        )

    async def metrics(self, url: str) -> bytes:
        """The page of metrics of the instance at this URL.

        Raises:
            ProxyError: it has not shown it.
        """
        answer = await self._upstream.fetch(
            url + "/metrics", stage="decode", headers={}, timeout_s=QUESTION_TIMEOUT_S
        )
        return answer.body if answer.ok else b""

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
            opened = await self._upstream.open(
                instance.url + endpoint.path,
                stage="release",
                headers=context.headers_for(context.child_id(), span),
                body=endpoint.written(endpoint.release(body), context.cuts),
                head_timeout_s=RELEASE_TIMEOUT_S,
            )
            with opened as reply:
                # An engine that fails it has had it, and has told prefill.
                if not reply.ok and reply.status != HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise UpstreamFailed(
                        f"the decode instance answered {reply.status}",
                        slug="release_failed",
                        stage="release",
                    )


def _head_timeout_s(body: Body, config: ProxyConfig) -> float:
    """Return how long decode may take to answer a request with its head.

    The head of a stream precedes the first token. The head of any other answer follows the last
    one, so that only the request's own deadline limits it.
    """
    return config.first_byte_timeout_s if is_stream(body) else config.request_timeout_s


def _refusal(answer: Answer, context: RequestContext, *, fetches: bool) -> ProxyError:
    """Return the error that decode's answer is: its own for the client, whatever its status."""
    status = answer.status
    if not HTTPStatus.BAD_REQUEST <= status <= MAX_STATUS:
        return UpstreamFailed(
            f"the decode instance answered {status}", slug="decode_bad_response", stage="decode"
        )
    return (
        _explained(answer, "decode", fetches=fetches)
        or _denied(status, "decode", context)
        or UpstreamRejected(status, answer.body, stage="decode", headers=answer.headers)
    )


def _accepted(answer: Answer, stage: Stage, context: RequestContext, *, fetches: bool) -> bytes:
    """Return the body of a 2xx answer; raise an error for any other.

    Args:
        answer: the instance's.
        stage: the instance's.
        context: the request's.
        fetches: whether the instance had to fetch media for it.
    """
    if answer.ok:
        return answer.body
    if explained := _explained(answer, stage, fetches=fetches):
        raise explained
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


def _explained(answer: Answer, stage: Stage, *, fetches: bool) -> ProxyError | None:
    """Return the error that a 500 names as its cause; None where it names none."""
    if answer.status != HTTPStatus.INTERNAL_SERVER_ERROR:
        return None
    if engine_died(answer.body):
        return UpstreamDied(
            f"the engine of the {stage} instance died", slug=f"{stage}_failed", stage=stage
        )
    if fetches and may_be_fetch(answer.body):
        return _fetch_failed(stage)
    return None


def _fetch_failed(stage: Stage) -> MediaFetchFailed:
    return MediaFetchFailed(
        f"the {stage} instance could not fetch the media: check that the host of the URL has an "
        "address, can be reached and answers",
        stage=stage,
    )


def _denied(status: int, stage: Stage, context: RequestContext) -> UpstreamDenied | None:
    """An error of the operator's, where the key that an instance refused is not the client's."""
    if context.clients_key or status not in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return None
    return UpstreamDenied(
        f"the {stage} instance refused the proxy's key", slug=f"{stage}_auth", stage=stage
    )
