"""What clients ask: media, models, and answers, which are relayed as decode gives them."""

import asyncio

from aiohttp import web

from epd.bodies.items import Body
from epd.bodies.parsing import cut_and_parsed
from epd.bodies.prompts import CONVERSATION, conversation_id
from epd.cache.identity import conversation_key, salted
from epd.conversations.turn import Turn
from epd.errors import RequestRefused
from epd.http.reply import Reply
from epd.request import warmup
from epd.request.context import RequestContext
from epd.request.relay import StreamRelay
from epd.server.admittance import read
from epd.server.answers import as_json, own_headers
from epd.server.assembly import ADMIN, CONVERSATIONS, PIPELINE, WARMUP
from epd.server.slots import ANSWERED, CONFIG, CONTEXT, STREAM
from epd.tenants import ANONYMOUS

MAX_DECODE_BYTES = 256 * 1024**2
"""Largest answer of decode that is no stream: it is whole before the first byte goes out, so that
what breaks off can still be an error."""


async def answer(request: web.Request) -> web.StreamResponse:
    """`POST` to an endpoint, streaming and not."""
    app, context = request.app, request[CONTEXT]
    config, endpoint = app[CONFIG], context.endpoint
    content_type = request.headers.get("Content-Type", "")
    body, context.cuts = endpoint.read(await read(request), content_type)
    context.model = body.get("model")
    if context.span is not None:
        context.span.asks(endpoint.operation, context.model)
    if endpoint.salted and context.tenant is not ANONYMOUS:  # whom all share with
        body = salted(body, config.scope_of(context.tenant))
    if CONVERSATION in body:
        body, context.turn = _turn(request, body)
        if context.turn is not None:
            context.session = context.session or context.turn.key
    async with await app[PIPELINE].run(body, context) as reply:
        headers = _answer_headers(reply, context)
        if not headers["Content-Type"].startswith("text/event-stream"):
            whole = await reply.read(idle_s=config.idle_timeout_s, limit=MAX_DECODE_BYTES)
            context.whole(whole)
            if context.turn is not None:
                whole = context.turn.hear(whole)
                await app[CONVERSATIONS].keep(context.turn)
            return web.Response(status=reply.status, body=whole, headers=headers)
        stream = request[STREAM] = web.StreamResponse(
            status=reply.status, headers={**headers, "Cache-Control": "no-cache"}
        )
        await stream.prepare(request)
        relay = StreamRelay(reply, stream, _transport(request), context)
        await relay.run(config.idle_timeout_s)
        if context.turn is not None:
            await app[CONVERSATIONS].keep(context.turn)
        await stream.write_eof()
        request[ANSWERED] = stream.status
        await relay.drained()
        return stream


def _turn(request: web.Request, body: Body) -> tuple[Body, Turn | None]:
    """The request as it goes on, and which turn of a conversation it is; None: of none.

    Raises:
        BadRequest: what it calls its conversation is no name.
    """
    app, context, name = request.app, request[CONTEXT], conversation_id(body)
    body = {key: value for key, value in body.items() if key != CONVERSATION}
    if name is None or not context.endpoint.generates:
        return body, None
    return body, Turn(conversation_key(app[CONFIG].name_scope_of(context.tenant), body, name))


def _transport(request: web.Request) -> asyncio.WriteTransport:
    """The client's connection.

    Raises:
        ConnectionResetError: the client has left.
    """
    if request.transport is None:
        raise ConnectionResetError("the client has left")
    return request.transport


def _answer_headers(reply: Reply, context: RequestContext) -> dict[str, str]:
    headers, content_type = own_headers(context), reply.headers.get("Content-Type", "")
    headers["Content-Type"] = content_type if content_type.isprintable() else ""
    return headers


async def push_media(request: web.Request) -> web.Response:
    """`POST /v1/media`: has media encoded ahead of the request that asks about them."""
    context = request[CONTEXT]
    body, context.cuts = cut_and_parsed(await read(request), warmup.parse)
    context.model = body.get("model")
    answer = await request.app[WARMUP].push(body, context)
    return as_json(answer, context)


async def forget_media(request: web.Request) -> web.Response:
    """`DELETE /v1/media/{uuid}?model=…`: forgets what the client calls so."""
    context = request[CONTEXT]
    uuid, context.model = request.match_info["uuid"], request.query.get("model")
    await request.app[PIPELINE].forget(uuid, context.model, context)
    return as_json({"id": uuid, "object": "media.deleted", "deleted": True}, context)


async def models(request: web.Request) -> web.Response:
    """`GET /v1/models`: the decode side's."""
    context = request[CONTEXT]
    answer = await request.app[ADMIN].models(context.headers)
    return web.Response(
        body=answer.body, content_type="application/json", headers=own_headers(context)
    )


async def kept_response(_: web.Request) -> web.StreamResponse:
    """`/v1/responses/{id}`: there is none, as no engine keeps any."""
    raise RequestRefused(
        404,
        "responses are not kept: send the whole conversation as input",
        slug="unsupported_route",
    )
