"""Client routes: the generation endpoints, media and models. Decode's responses are relayed.

The docstrings of the handlers are published in `/openapi.json` (see `openapi.py`).
"""

from http import HTTPStatus
from typing import Literal, TypedDict

from aiohttp import HttpVersion11, web

from epd.api.body import NO_CUTS, cut_and_parsed
from epd.api.usage import whole_with_usage
from epd.conversations.conversations import Conversations
from epd.edge import engine_headers
from epd.edge.drain import DRAIN
from epd.errors import RequestRefused
from epd.request import warmup
from epd.request.context import RequestContext
from epd.request.pipeline import Pipeline
from epd.request.stream import StreamRelay
from epd.server.admin import ADMIN
from epd.server.app_keys import VISIT, Visit
from epd.server.intake import read_json, request_body, watch
from epd.server.key_judge import check_key
from epd.server.responses import JsonResponse, WholeResponse, as_json, own_headers
from epd.upstream import Reply

PIPELINE = web.AppKey("pipeline", Pipeline)
WARMUP = web.AppKey("warmup", warmup.Warmup)
CONVERSATIONS = web.AppKey("conversations", Conversations)

GUARDED = ("/v1/", "/v2/")
"""Prefixes of the paths at which an instance started with `--api-key` checks the client's key."""

TAIL_BYTES = 16 * 1024
"""Size of the end of a relayed answer in which its usage is.

After it vLLM sends small fields only, but for `prompt_logprobs`, `prompt_token_ids`, `prompt_text`
and the block ids of `kv_transfer_params` of chat completions. If they are larger, decode's own
numbers are sent."""


class MediaDeleted(TypedDict):
    """Result of the deletion of a name of media."""

    id: str
    object: Literal["media.deleted"]
    deleted: Literal[True]


async def answer_request(request: web.Request) -> web.StreamResponse:
    """Answer `POST` to a generation endpoint, streaming or not."""
    visit = request[VISIT]
    context = visit.context
    if not context.endpoint.path.startswith(GUARDED):
        await check_key(request)
    opened = await visit.app[PIPELINE].run(await request_body(request, visit), context)
    # Decode has the whole request and the proxy does not send it again: the body can be freed.
    context.cuts = NO_CUTS
    visit.admitted.release()
    with opened as reply:
        headers = _answer_headers(reply, context)
        if reply.is_stream:
            return await _streamed(request, visit, reply, headers)
        visit.admitted.set_size(reply.read_bytes)
        if not reply.is_whole:
            return await _relayed(request, visit, reply, headers)
        whole = await reply.read(idle_s=context.config.idle_timeout_s)
        context.record_whole(whole)
        if context.turn is not None:
            whole = context.turn.capture_fields(whole)
            await visit.app[CONVERSATIONS].store_turn(context.turn)
        whole = whole_with_usage(whole, context.prefill_usage)
        context.record.answer_bytes = len(whole)
        # A response to a page of another origin gets its CORS headers by a signal.
        if reply.status == HTTPStatus.OK and not visit.app.on_response_prepare:
            return WholeResponse(whole, headers)
        return web.Response(status=reply.status, body=whole, headers=headers)


async def _streamed(
    request: web.Request, visit: Visit, reply: Reply, headers: dict[str, str]
) -> web.StreamResponse:
    app, context = visit.app, visit.context
    context.record.stream = True
    headers["Cache-Control"] = "no-cache"
    stream = await _begin_response(request, visit, reply.status, headers)
    if request.transport is None:
        raise ConnectionResetError("the client has disconnected")
    relay = StreamRelay(reply, stream, request.transport, context)
    await relay.run(context.config.idle_timeout_s)
    if context.turn is not None:
        await app[CONVERSATIONS].store_turn(context.turn)
    await stream.write_eof()
    visit.answered = stream.status
    await relay.drain_reply()
    return stream


async def _relayed(
    request: web.Request, visit: Visit, reply: Reply, headers: dict[str, str]
) -> web.StreamResponse:
    """Relay an answer that is too large to be held, as fast as the client reads it.

    Its last bytes are held back if numbers in its usage are to be replaced.
    """
    app, context = visit.app, visit.context
    usage, tail = context.prefill_usage, b""
    length = reply.headers.get("Content-Length")
    if length is not None and not usage:  # other numbers may have more digits
        headers["Content-Length"] = length
    stream = await _begin_response(request, visit, reply.status, headers)
    context.record_whole(b"")
    while chunk := await reply.chunk(context.config.idle_timeout_s):
        context.record.answer_bytes += len(chunk)
        if usage:
            chunk = tail + chunk
            chunk, tail = chunk[:-TAIL_BYTES], chunk[-TAIL_BYTES:]
        await stream.write(chunk)
    if tail:
        await stream.write(whole_with_usage(tail, usage))
    if context.turn is not None:
        await app[CONVERSATIONS].store_turn(context.turn)
    await stream.write_eof()
    visit.answered = stream.status
    return stream


async def _begin_response(
    request: web.Request, visit: Visit, status: int, headers: dict[str, str]
) -> web.StreamResponse:
    stream = visit.stream = web.StreamResponse(status=status, headers=headers)
    # Only the end of the connection ends a stream to an HTTP/1.0 client: it has no chunks.
    if visit.app[DRAIN].began or request.version < HttpVersion11:
        stream.force_close()
    await stream.prepare(request)
    return stream


def _answer_headers(reply: Reply, context: RequestContext) -> dict[str, str]:
    headers, content_type = own_headers(context), reply.headers.get("Content-Type", "")
    headers["Content-Type"] = content_type if content_type.isprintable() else ""
    return headers | engine_headers.passed_back(reply.headers)


async def push_media(request: web.Request) -> JsonResponse[warmup.MediaPage]:
    """Encode media before a request uses them.

    Returns:
        200: the encoder outputs are in the store.

    Raises:
        RequestRefused: 503, the proxy has no encoder store, or the outputs did not reach it.
    """
    context = request[VISIT].context
    await check_key(request)  # for stored media, no instance would check the key
    raw = await read_json(request)
    watch(context, raw)
    body, context.cuts, _ = cut_and_parsed(raw, warmup.parse, context.config.max_text_bytes)
    context.model = body.get("model")
    answer = await request.app[WARMUP].push(body, context)
    return as_json(answer, context)


async def forget_media(request: web.Request) -> JsonResponse[MediaDeleted]:
    """Forget the name of the client's media.

    Returns:
        200: the name is deleted.
    """
    context = request[VISIT].context
    await check_key(request)
    uuid, context.model = request.match_info["uuid"], request.query.get("model")
    await request.app[PIPELINE].forget_uuid(uuid, context.model, context)
    return as_json(MediaDeleted(id=uuid, object="media.deleted", deleted=True), context)


async def list_models(request: web.Request) -> web.Response:
    """Return the models of one decode instance.

    Returns:
        200: response of the decode instance, unchanged.
    """
    return await _of_decode(request, "/v1/models")


async def get_tokenizer_info(request: web.Request) -> web.Response:
    """Return the tokenizer of one decode instance.

    Instances without `--enable-tokenizer-info-endpoint` answer 404.

    Returns:
        200: response of the decode instance, unchanged.
    """
    await check_key(request)  # the instance does not check a key at this path
    return await _of_decode(request, "/tokenizer_info")


async def _of_decode(request: web.Request, path: str) -> web.Response:
    context = request[VISIT].context
    answer = await request.app[ADMIN].of_decode(path, context.headers)
    return web.Response(
        body=answer.body, content_type="application/json", headers=own_headers(context)
    )


async def get_response(_: web.Request) -> web.StreamResponse:
    """Answer 404: responses are not stored.

    Raises:
        RequestRefused: 404, always.
    """
    raise RequestRefused(
        404,
        "responses are not kept: send the whole conversation as input",
        slug="unsupported_route",
    )


async def cancel_response(request: web.Request) -> web.StreamResponse:
    """Answer 404: responses are not stored. To cancel one, close its connection.

    Raises:
        RequestRefused: 404, always.
    """
    return await get_response(request)
