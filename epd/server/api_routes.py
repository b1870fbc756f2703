"""Client routes: the generation endpoints, media and models. Decode's responses are relayed."""

import time
from http import HTTPStatus
from typing import Literal

from aiohttp import HttpVersion11, web
from typing_extensions import TypedDict

from epd.api.body import cut_and_parsed
from epd.api.usage import whole_with_usage
from epd.conversations.conversations import Conversations
from epd.edge import engine_headers
from epd.edge.drain import DRAIN
from epd.encoder_cache.keys import Keys
from epd.errors import RequestRefused
from epd.request import warmup
from epd.request.pipeline import Pipeline
from epd.request.prefill_decode import DecodeAnswer
from epd.request.stream import StreamRelay
from epd.server.admin import ADMIN
from epd.server.app_keys import VISIT, Visit
from epd.server.intake import make_request, read_json, read_request
from epd.server.key_judge import check_key
from epd.server.responses import JsonResponse, as_json, response_headers
from epd.server.whole_response import WholeResponse
from epd.upstream import Reply

PIPELINE = web.AppKey("pipeline", Pipeline)
WARMUP = web.AppKey("warmup", warmup.Warmup)
MEDIA_KEYS = web.AppKey("media keys", Keys)
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
    if not visit.endpoint.path.startswith(GUARDED):
        await check_key(request)
    answer = await visit.app[PIPELINE].run(await read_request(request, visit))
    # Decode has the whole request, and nothing refers to its body any more.
    visit.admitted.release()
    with answer:
        headers = _answer_headers(answer.reply, visit)
        if answer.reply.is_stream:
            return await _streamed(request, visit, answer, headers)
        visit.admitted.set_size(answer.reply.read_bytes)
        if not answer.reply.is_whole:
            return await _relayed(request, visit, answer, headers)
        whole = await answer.reply.read(idle_s=visit.config.idle_timeout_s)
        _record_whole(visit, whole)
        if answer.turn is not None:
            whole = answer.turn.capture_fields(whole)
            await visit.app[CONVERSATIONS].store_turn(answer.turn)
        if answer.usage:
            whole = whole_with_usage(whole, answer.usage)
        visit.record.set_answer(len(whole))
        # A response to a page of another origin gets its CORS headers by a signal.
        if answer.reply.status == HTTPStatus.OK and not visit.app.on_response_prepare:
            return WholeResponse(whole, headers)
        return web.Response(status=answer.reply.status, body=whole, headers=headers)


async def _streamed(
    request: web.Request, visit: Visit, answer: DecodeAnswer, headers: dict[str, str]
) -> web.StreamResponse:
    visit.record.begin_stream()
    headers["Cache-Control"] = "no-cache"
    stream = await _begin_response(request, visit, answer.reply.status, headers)
    if request.transport is None:
        raise ConnectionResetError("the client has disconnected")
    grammar = visit.endpoint.grammar
    relay = StreamRelay(answer, stream, request.transport, grammar, visit.record)
    await relay.run(visit.config.idle_timeout_s)
    await _end_response(visit, answer, stream)
    await relay.drain_reply()
    return stream


async def _relayed(
    request: web.Request, visit: Visit, answer: DecodeAnswer, headers: dict[str, str]
) -> web.StreamResponse:
    """Relay an answer that is too large to be held, as fast as the client reads it.

    Its last bytes are held back if numbers in its usage are to be replaced.
    """
    reply, usage, tail = answer.reply, answer.usage, b""
    length = reply.headers.get("Content-Length")
    if length is not None and not usage:  # other numbers may have more digits
        headers["Content-Length"] = length
    stream = await _begin_response(request, visit, reply.status, headers)
    _record_whole(visit, b"")
    while chunk := await reply.chunk(visit.config.idle_timeout_s):
        visit.record.add_answer(len(chunk))
        if usage:
            chunk = tail + chunk
            chunk, tail = chunk[:-TAIL_BYTES], chunk[-TAIL_BYTES:]
        await stream.write(chunk)
    if usage and tail:
        await stream.write(whole_with_usage(tail, usage))
    await _end_response(visit, answer, stream)
    return stream


async def _end_response(visit: Visit, answer: DecodeAnswer, stream: web.StreamResponse) -> None:
    """Store the turn, and only then end the response: the client may send the next turn at once."""
    if answer.turn is not None:
        await visit.app[CONVERSATIONS].store_turn(answer.turn)
    await stream.write_eof()
    visit.answered = stream.status


def _record_whole(visit: Visit, whole: bytes) -> None:
    """Record a complete answer of decode that is no stream."""
    if visit.endpoint.generates:
        visit.record.add_first_token(time.monotonic())
    visit.record.learn_model(whole)


async def _begin_response(
    request: web.Request, visit: Visit, status: int, headers: dict[str, str]
) -> web.StreamResponse:
    stream = visit.stream = web.StreamResponse(status=status, headers=headers)
    # Only the end of the connection ends a stream to an HTTP/1.0 client: it has no chunks.
    if visit.app[DRAIN].began or request.version < HttpVersion11:
        stream.force_close()
    await stream.prepare(request)
    return stream


def _answer_headers(reply: Reply, visit: Visit) -> dict[str, str]:
    headers, content_type = response_headers(visit.record), reply.headers.get("Content-Type", "")
    headers["Content-Type"] = content_type if content_type.isprintable() else ""
    return headers | engine_headers.passed_back(reply.headers)


async def push_media(request: web.Request) -> JsonResponse[warmup.MediaPage]:
    """Encode media before a request uses them."""
    visit = request[VISIT]
    await check_key(request)  # for stored media, no instance would check the key
    raw = await read_json(request)
    body, cuts, _ = cut_and_parsed(raw, warmup.parse, visit.config.max_text_bytes)
    visit.record.begin_request(body.get("model"))
    page = await request.app[WARMUP].push(lambda: make_request(request, raw, body, cuts))
    return as_json(page, visit.record)


async def forget_media(request: web.Request) -> JsonResponse[MediaDeleted]:
    """Forget the name of the client's media."""
    visit = request[VISIT]
    await check_key(request)
    uuid, model = request.match_info["uuid"], request.query.get("model")
    visit.record.begin_request(model)
    await request.app[MEDIA_KEYS].forget_uuid(uuid, model, visit.tenant, visit.config)
    return as_json(MediaDeleted(id=uuid, object="media.deleted", deleted=True), visit.record)


async def list_models(request: web.Request) -> web.Response:
    """Return the models of one decode instance."""
    return await _of_decode(request, "/v1/models")


async def get_tokenizer_info(request: web.Request) -> web.Response:
    """Return the tokenizer of one decode instance.

    Instances without `--enable-tokenizer-info-endpoint` answer 404.
    """
    await check_key(request)  # the instance does not check a key at this path
    return await _of_decode(request, "/tokenizer_info")


async def _of_decode(request: web.Request, path: str) -> web.Response:
    visit = request[VISIT]
    answer = await request.app[ADMIN].of_decode(path, visit.headers)
    return web.Response(
        body=answer.body, content_type="application/json", headers=response_headers(visit.record)
    )


async def get_response(_: web.Request) -> web.StreamResponse:
    """Answer 404: responses are not stored. To cancel one, close its connection."""
    raise RequestRefused(
        404,
        "responses are not kept: send the whole conversation as input",
        slug="unsupported_route",
    )
