"""Stages encode, prefill, decode and release, as requests to instances."""

import asyncio
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from epd.api.body import reply_field
from epd.api.chat import CHAT, encode_body, has_system_message
from epd.api.endpoint import encode_json, is_stream
from epd.api.items import Body, MMItem
from epd.api.sse import Grammar, engine_died, may_be_fetch
from epd.api.usage import prefill_usage
from epd.edge.engine_headers import PRIORITY
from epd.errors import (
    BUSY,
    MediaFetchFailed,
    Outcome,
    ProxyError,
    Stage,
    UpstreamBusy,
    UpstreamDenied,
    UpstreamDied,
    UpstreamFailed,
    UpstreamRejected,
    UpstreamTimeout,
    reported_retry_after_s,
)
from epd.json_or_none import json_or_none
from epd.request.encode_form import EncodeForms
from epd.request.request import Request
from epd.routing.instances import CONSUMERS, Instance
from epd.transfer import Params
from epd.transfer.encoded import OutputFacts, Prompt, read_encoded
from epd.transfer.kv import Handover, KVTransfer, Prefilled
from epd.upstream import Reply, Upstream, WholeReply, too_large

if TYPE_CHECKING:
    from epd.spans import Span

MAX_REJECTED_STATUS, MAX_STATUS = 499, 599

WHOLE_BYTES = 1024**2
"""Size above which an answer of decode that is no stream is relayed as it arrives."""

MAX_DECODE_BYTES = 256 * 1024**2
"""Maximum size of an answer of decode from which a turn's fields are extracted."""

FULL_SHARE = 0.9
"""Share of `--encode-timeout-s` after which a timeout of an encode is the instance's failure."""

LATE_SHARE = 0.4
"""Share of it after which the timeout is a failure if the instance made no progress."""

BEGINNING_S = 0.1
"""Seconds for which the first event of a stream is held back. vLLM sends the second one with it."""

QUESTION_TIMEOUT_S = 2.0
"""Timeout of the questions to an instance before its prefill."""


class Stages:
    """Client that sends the requests of all stages over one upstream client."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        whole_bytes: int = WHOLE_BYTES,
        max_decode_bytes: int = MAX_DECODE_BYTES,
    ) -> None:
        self._upstream = upstream
        self._whole_bytes = whole_bytes
        self._max_decode_bytes = max_decode_bytes
        self._encode_forms = EncodeForms()

    async def encode(  # noqa: PLR0913, PLR0917 - all describe one request
        self,
        instance: Instance,
        body: Body,
        item: MMItem,
        params: Params | None,
        request: Request,
        timeout_s: float,
    ) -> OutputFacts:
        """Encode one item.

        `params` are the `ec_transfer_params` of the request. If the instance refuses an optional
        field, the request is sent again without it, in what is left of `timeout_s`. A timeout is a
        failure of the instance if it had nearly all of `--encode-timeout-s`. It counts as late if
        it had nearly half of it.

        Raises:
            ProxyError: the instance failed, or rejected the item.
        """
        remote = item.is_remote
        with request.record.time_stage("encode", instance.url, item) as stage:
            headers = request.headers_for(request.child_id(), stage.span)
            headers.pop(PRIORITY, None)  # one encode serves all requests with this item
            forms, system = self._encode_forms, has_system_message(body)
            encode_request = forms.first_form(
                instance, encode_body(body, item, params), system=system
            )
            clock = asyncio.get_running_loop().time
            until_s = clock() + timeout_s
            try:
                while True:
                    reply = await self._upstream.fetch(
                        instance.url + CHAT.path,
                        stage="encode",
                        headers=headers,
                        body=encode_json(encode_request, request.cuts),
                        timeout_s=until_s - clock(),
                    )
                    other = forms.next_form(instance, encode_request, reply.status, system=system)
                    if other is None:
                        break
                    encode_request = other
            except UpstreamTimeout as error:
                share = timeout_s / request.config.encode_timeout_s
                if remote and share >= LATE_SHARE:  # the media's host may have caused the delay
                    raise _fetch_failed("encode") from error
                if share < FULL_SHARE:
                    error.outcome = Outcome.LATE if share >= LATE_SHARE else Outcome.NOTHING
                raise
            stage.record_status(reply.status)
            content = _body_of(reply, "encode", request, fetches=remote)
            forms.record_success(instance, encode_request)
            if "model" in encode_request:
                request.record.learn_model(content)
            return read_encoded(content, item.modality)

    async def prefill(
        self, transfer: KVTransfer, handover: Handover, prompt: Prompt, request: Request
    ) -> Prefilled:
        """Prefill a prompt for one decode. Return what decode and the client need of the reply.

        Raises:
            ProxyError: the instance failed, or its reply lacks required parameters of its blocks.
        """
        endpoint, instance, record = request.endpoint, handover.prefill, request.record
        body = endpoint.prefill(prompt.body, transfer.prefill_params(handover))
        with record.time_stage("prefill", instance.url) as stage:
            reply = await self._upstream.fetch(
                instance.url + endpoint.path,
                stage="prefill",
                headers=request.headers_for(
                    handover.request_id, stage.span, handover.prefill_rank, mark=prompt.mark
                ),
                body=endpoint.encode_body(body, request.cuts),
                timeout_s=request.config.prefill_timeout_s,
            )
            stage.record_status(reply.status)
            content = _body_of(reply, "prefill", request, fetches=prompt.fetches)
            record.learn_model(content)
            block_params = reply_field(content, "kv_transfer_params", stage="prefill")
            params = transfer.decode_params(handover, block_params)
            usage = prefill_usage(content)
        record.add_prefilled(time.monotonic())
        return Prefilled(handover, params, block_params, usage)

    async def decode(  # noqa: PLR0913, PLR0917 - all describe one request
        self,
        instance: Instance,
        prompt: Prompt,
        request: Request,
        request_id: str,
        rank: int | None = None,
        span: "Span | None" = None,
    ) -> Reply:
        """Send a request to decode, and return the head of its answer, with a 2xx status.

        The prompt has the `kv_transfer_params`; without them, decode prefills.

        Raises:
            UpstreamRejected: the instance answered with another status.
            ProxyError: the instance failed.
        """
        endpoint, config = request.endpoint, request.config
        body = _for_role(prompt.body, instance)
        content_type = endpoint.content_type(body)
        # The head of a stream precedes the first token, that of any other answer follows the last.
        streams = is_stream(body)
        reply = await self._upstream.open(
            instance.url + endpoint.path,
            stage="decode",
            headers=request.headers_for(request_id, span, rank, content_type, mark=prompt.mark),
            body=endpoint.encode_body(body, request.cuts),
            head_timeout_s=config.first_byte_timeout_s if streams else config.request_timeout_s,
        )
        if span is not None:
            span.record_status(reply.status)
            span.event("head")
        if reply.ok:
            return reply
        with reply:
            content = await reply.read(idle_s=config.idle_timeout_s)
        whole = WholeReply(reply.status, reply.headers, content)
        raise _error_of(whole, "decode", request, fetches=prompt.fetches)

    async def wait_beginning(self, reply: Reply, request: Request, *, always_whole: bool) -> None:
        """Wait until the body of decode's answer has begun; close the answer after a failure.

        The client has seen no byte before the first one of a stream, or the last one of another
        answer that is read whole, because it is small or `always_whole`. Until then another
        instance can serve the request.

        Raises:
            ProxyError: the instance failed, or the answer has no room.
        """
        try:
            if not reply.is_stream:
                await self._read_whole(reply, request, always_whole=always_whole)
                return
            await reply.wait_body(request.config.idle_timeout_s)
            if request.items:
                await _check_beginning(reply, request.endpoint.grammar)
        except BaseException:
            reply.close()
            raise

    async def _read_whole(self, reply: Reply, request: Request, *, always_whole: bool) -> None:
        """Read an answer that is no stream, and count its bytes as they arrive.

        Unless `always_whole`, one beyond the limit, or without room, is read only in part.

        Raises:
            ProxyError: it was cut off; or it must be whole, and is too large (502) or has no room
                (503).
        """
        memory, size = request.memory, 0

        def may_read(more: int) -> bool:
            nonlocal size
            if always_whole:
                if size + more > self._max_decode_bytes:
                    raise too_large("decode", self._max_decode_bytes)
                memory.add(more)
            elif size + more > self._whole_bytes or not memory.try_add(more):
                return False
            size += more
            return True

        try:
            await reply.read_ahead(request.config.idle_timeout_s, may_read)
        except BaseException:
            memory.remove(size)
            raise

    async def prompt_tokens(
        self, instance: Instance, question: Body, request: Request
    ) -> list[int]:
        """Return the tokens of a prompt, as an instance computes them (`POST /tokenize`).

        Raises:
            ProxyError: the instance did not return them.
        """
        reply = await self._upstream.fetch(
            instance.url + "/tokenize",
            stage="prefill",
            headers=request.headers_for(request.child_id()),
            body=encode_json(question, request.cuts),
            timeout_s=QUESTION_TIMEOUT_S,
        )
        match json_or_none(reply.body) if reply.ok else None:
            case {"tokens": list() as tokens}:
                return tokens
        raise UpstreamFailed(
            "the prefill instance returned no tokens from /tokenize",
            slug="prefill_no_tokens",
            stage="prefill",
        )

    async def metrics(self, url: str) -> bytes:
        """Return the metrics page of the instance at this URL; empty for a status other than 2xx.

        Raises:
            ProxyError: the instance did not answer.
        """
        reply = await self._upstream.fetch(
            url + "/metrics", stage="decode", headers={}, timeout_s=QUESTION_TIMEOUT_S
        )
        return reply.body if reply.ok else b""

    async def release(
        self, instance: Instance, body: Body, request: Request, timeout_s: float
    ) -> None:
        """Ask decode to release the KV blocks of an abandoned prefill.

        Decode then notifies the prefill instance, which would otherwise keep the request's KV
        blocks until their lease expires (vLLM's NIXL connector, `request_finished`;
        `kv_lease_duration`, in older versions `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`). The request asks
        for one token. Closing the connection at the answer's head aborts the rest.

        Raises:
            ProxyError: the release failed.
        """
        endpoint = request.endpoint
        with request.record.time_stage("release", instance.url) as stage:
            reply = await self._upstream.open(
                instance.url + endpoint.path,
                stage="release",
                headers=request.headers_for(request.child_id(), stage.span),
                body=endpoint.encode_body(
                    endpoint.release(_for_role(body, instance)), request.cuts
                ),
                head_timeout_s=timeout_s,
            )
            with reply:
                # A 500 means that the engine had the request, and has notified prefill.
                if not reply.ok and reply.status != HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise UpstreamFailed(
                        f"the decode instance answered {reply.status}",
                        slug="release_failed",
                        stage="release",
                    )


def _for_role(body: Body, instance: Instance) -> Body:
    """Return the body without `ec_transfer_params` if the instance consumes no encoder outputs.

    vLLM logs a warning for each request that has them, at an engine without an EC connector
    (`vllm/v1/engine/core.py`, `add_request`).
    """
    if instance.role in CONSUMERS or "ec_transfer_params" not in body:
        return body
    return {name: value for name, value in body.items() if name != "ec_transfer_params"}


async def _check_beginning(reply: Reply, grammar: Grammar) -> None:
    """Raise the error of a stream that fails before its first token, as without an entry.

    vLLM has sent the head and the event before the first token by then. Both are held back until
    the next event, for at most `BEGINNING_S`.
    """
    events = await reply.peek_body(grammar.has_begun, BEGINNING_S)
    if (error := grammar.failure_inside(events)) is not None:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        raise UpstreamRejected(status, error, stage="decode", headers=reply.headers)


def _body_of(reply: WholeReply, stage: Stage, request: Request, *, fetches: bool) -> bytes:
    """Return the body of a 2xx reply; raise an error for any other."""
    if reply.ok:
        return reply.body
    raise _error_of(reply, stage, request, fetches=fetches)


def _error_of(reply: WholeReply, stage: Stage, request: Request, *, fetches: bool) -> ProxyError:
    """Return the error of a reply that is not 2xx.

    The client receives status and message of any error of decode, and of a 4xx of other stages.
    `fetches` tells whether the instance had to fetch media.
    """
    status, decodes = reply.status, stage == "decode"
    if status == HTTPStatus.INTERNAL_SERVER_ERROR and engine_died(reply.body):
        return UpstreamDied(
            f"the engine of the {stage} instance died", slug=f"{stage}_failed", stage=stage
        )
    if status == HTTPStatus.INTERNAL_SERVER_ERROR and fetches and may_be_fetch(reply.body):
        return _fetch_failed(stage)
    if status in BUSY and not decodes:
        return UpstreamBusy(
            f"the {stage} instances are overloaded",
            slug=f"{stage}_overloaded",
            stage=stage,
            retry_after_s=reported_retry_after_s(reply.headers),
        )
    denied = status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
    if denied and not request.clients_key:
        return UpstreamDenied(
            f"the {stage} instance rejected the proxy's API key", slug=f"{stage}_auth", stage=stage
        )
    if HTTPStatus.BAD_REQUEST <= status <= (MAX_STATUS if decodes else MAX_REJECTED_STATUS):
        return UpstreamRejected(status, reply.body, stage=stage, headers=reply.headers)
    return UpstreamFailed(
        f"the {stage} instance answered {status}",
        slug="decode_bad_response" if decodes else f"{stage}_failed",
        stage=stage,
        answered=status,
    )


def _fetch_failed(stage: Stage) -> MediaFetchFailed:
    return MediaFetchFailed(
        f"the {stage} instance could not fetch the media: check that the host of the URL has an "
        "address, is reachable and answers",
        stage=stage,
    )
