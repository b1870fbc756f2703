"""Encode, prefill, decode and release: one stage each, as requests to instances."""

import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from http import HTTPStatus
from types import TracebackType
from typing import NamedTuple

import orjson

from epd.bodies.chat import CHAT
from epd.bodies.endpoint import written
from epd.bodies.items import Body, MMItem
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
from epd.http.reply import Answer, Reply
from epd.http.upstream import Upstream
from epd.request.context import RequestContext, Timed
from epd.routing.health import BUSY
from epd.routing.instances import Instance
from epd.transfer.encoded import Encoded, read_encoded
from epd.transfer.kv import KVTransfer, Pair
from epd.transfer.params import Params, reply_field

MAX_STATUS = 599

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


class Stages:
    """The three stages, over one upstream."""

    def __init__(self, upstream: Upstream, config: ProxyConfig) -> None:
        self._upstream = upstream
        self._config = config

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
            answer = await self._upstream.fetch(
                instance.url + CHAT.path,
                stage="encode",
                headers=context.headers_for(context.child_id(), span),
                body=written(body, context.cuts),
                timeout_s=self._config.encode_timeout_s,
            )
            if span is not None:
                span.answered(answer.status)
            accepted = _accepted(answer, "encode", context)
            context.named(accepted)
            return read_encoded(accepted, item.modality)

    async def prefill(
        self,
        transfer: KVTransfer,
        pair: Pair,
        body: Body,
        context: RequestContext,
    ) -> Prefilled:
        """Prefill the request, for one decode.

        Args:
            transfer: how decode gets the KV blocks.
            pair: who prefills, and for whom.
            body: the request.
            context: the request's.

        Raises:
            ProxyError: the instance failed, or said nothing of its blocks where it has to.
        """
        endpoint, instance = context.endpoint, pair.prefill
        asked = endpoint.prefill(body, transfer.prefill_params(pair))
        with context.timed("prefill", instance.url) as span:
            answer = await self._upstream.fetch(
                instance.url + endpoint.path,
                stage="prefill",
                headers=context.headers_for(transfer.request_id(pair), span, pair.prefill_rank),
                body=endpoint.written(asked, context.cuts),
                timeout_s=self._config.prefill_timeout_s,
            )
            if span is not None:
                span.answered(answer.status)
            accepted = _accepted(answer, "prefill", context)
            context.named(accepted)
            replied = reply_field(accepted, "kv_transfer_params", stage="prefill")
            params = transfer.decode_params(pair, replied)
        context.record.prefilled_s = time.monotonic()
        return Prefilled(replied, params)

    def decode(
        self,
        instance: Instance,
        body: Body,
        context: RequestContext,
        rank: int | None = None,
        request_id: str | None = None,
    ) -> "Decoding":
        """Open the decode answer. The context is entered once the instance has said 2xx.

        Args:
            instance: who decodes.
            body: the request.
            context: the request's.
            rank: the instance's data-parallel rank; None: the instance sees to it.
            request_id: the id that it sees; None: the request's.

        Raises:
            UpstreamRejected: the instance said anything else.
            ProxyError: the instance failed.
        """
        endpoint, timed = context.endpoint, context.timed("decode", instance.url)
        opening = self._upstream.open(
            instance.url + endpoint.path,
            stage="decode",
            headers=context.headers_for(
                request_id or context.request_id, timed.span, rank, endpoint.content_type(body)
            ),
            body=endpoint.written(body, context.cuts),
            head_timeout_s=self._config.first_byte_timeout_s,
        )
        return Decoding(opening, timed, context, self._config.idle_timeout_s)

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
                self._context.record.at = "answer"
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
