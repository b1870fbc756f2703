"""Client routes: the generation endpoints, media and models. Decode's responses are relayed."""

import asyncio
import secrets

from aiohttp import web

from epd.bodies.cuts import NO_CUTS
from epd.bodies.items import Body
from epd.bodies.parsing import cut_and_parsed
from epd.bodies.prompts import CONVERSATION, conversation_id
from epd.cache.identity import conversation_key, salted
from epd.conversations.turn import Turn
from epd.edge import engine_headers
from epd.edge.access import Headers
from epd.edge.drain import DRAIN
from epd.errors import RequestRefused
from epd.request import warmup
from epd.request.context import RequestContext
from epd.request.relay import StreamRelay
from epd.routing.fatal import Watched, fingerprint
from epd.server.admittance import read, read_json
from epd.server.answers import as_json, own_headers
from epd.server.assembly import ADMIN, CONVERSATIONS, PIPELINE, WARMUP
from epd.server.keys import check_key
from epd.server.visit import VISIT, Visit
from epd.tenants import ANONYMOUS
from epd.upstream.reply import Reply

SEED = secrets.randbits(64)
"""Seed of this process for the fingerprints of bodies."""

GUARDED = ("/v1/", "/v2/")
"""Prefixes of the paths at which an instance started with `--api-key` checks the client's key."""

PRIORITY = "priority"
"""Field of a request: its priority among the requests that wait at an engine."""


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer `POST` to a generation endpoint, streaming or not."""
    visit = request[VISIT]
    context = visit.context
    opened = await visit.app[PIPELINE].run(await _body(request, visit), context)
    # Decode has the whole request and the proxy does not send it again: the body can be freed.
    context.cuts = NO_CUTS
    visit.admitted.release()
    with opened as reply:
        headers = _answer_headers(reply, context)
        if reply.is_stream:
            return await _streamed(request, visit, reply, headers)
        whole = await reply.read(idle_s=context.config.idle_timeout_s)
        context.whole(whole)
        if context.turn is not None:
            whole = context.turn.hear(whole)
            await visit.app[CONVERSATIONS].keep(context.turn)
        return web.Response(status=reply.status, body=whole, headers=headers)


async def _body(request: web.Request, visit: Visit) -> Body:
    """Return a request's body as the stages get it, and set the fields of its context.

    Raises:
        ProxyError: the request is rejected.
    """
    context = visit.context
    config, endpoint = context.config, context.endpoint
    if not endpoint.path.startswith(GUARDED):
        await check_key(request)
    raw = await read(request)
    context.watched = Watched(context.tenant.name, fingerprint(raw, SEED))
    content_type = request.headers.get("Content-Type", "")
    body, context.cuts = endpoint.read(raw, content_type, config.max_text_bytes)
    body = endpoint.at_interval(body, config.stream_interval)
    context.model = body.get("model")
    if context.span is not None:
        context.span.asks(endpoint.operation, context.model)
    if endpoint.salted and context.tenant is not ANONYMOUS:  # without keys, all clients share
        body = salted(body, config.scope_of(context.tenant))
    body = _for_engines(request.headers, context, body)
    if CONVERSATION in body:
        body, context.turn = _turn(context, body)
        if context.turn is not None:
            context.session = context.session or context.turn.key
    return body


async def _streamed(
    request: web.Request, visit: Visit, reply: Reply, headers: dict[str, str]
) -> web.StreamResponse:
    """Relay the stream of the decode instance to the client, up to its end."""
    app, context = visit.app, visit.context
    stream = visit.stream = web.StreamResponse(
        status=reply.status, headers={**headers, "Cache-Control": "no-cache"}
    )
    context.record.stream = True
    if app[DRAIN].began:
        stream.force_close()
    await stream.prepare(request)
    relay = StreamRelay(reply, stream, _transport(request), context)
    await relay.run(context.config.idle_timeout_s)
    if context.turn is not None:
        await app[CONVERSATIONS].keep(context.turn)
    await stream.write_eof()
    visit.answered = stream.status
    await relay.drained()
    return stream


def _for_engines(client_headers: Headers, context: RequestContext, body: Body) -> Body:
    """Forward the client's headers for engines; return the body with the request's priority.

    Only a trusted tenant may set a priority and see an instance's load: a priority puts a request
    before those of other tenants, and the load shows their activity.
    """
    endpoint, trusted = context.endpoint, context.config.trusts(context.tenant)
    headers = engine_headers.sent_on(client_headers, trusted=trusted)
    priority = engine_headers.priority_of(client_headers)
    if not trusted:
        body = {key: value for key, value in body.items() if key != PRIORITY}
    elif endpoint.generates and priority is not None:
        # As a field it reaches prefill and decode, and not the encode stage.
        if endpoint.priority_field:
            body = {**body, PRIORITY: priority}
        else:
            headers[engine_headers.PRIORITY] = str(priority)
    if headers:
        context.headers = {**context.headers, **headers}
    return body


def _turn(context: RequestContext, body: Body) -> tuple[Body, Turn | None]:
    """Return the body without its conversation's name, and its turn; None without a conversation.

    Raises:
        BadRequest: the name of the conversation is invalid.
    """
    name = conversation_id(body)
    body = {key: value for key, value in body.items() if key != CONVERSATION}
    if name is None or not context.endpoint.generates:
        return body, None
    return body, Turn(conversation_key(context.config.name_scope_of(context.tenant), body, name))


def _transport(request: web.Request) -> asyncio.WriteTransport:
    """Return the transport of the client's connection.

    Raises:
        ConnectionResetError: the client has disconnected.
    """
    if request.transport is None:
        raise ConnectionResetError("the client has disconnected")
    return request.transport


def _answer_headers(reply: Reply, context: RequestContext) -> dict[str, str]:
    headers, content_type = own_headers(context), reply.headers.get("Content-Type", "")
    headers["Content-Type"] = content_type if content_type.isprintable() else ""
    return headers | engine_headers.passed_back(reply.headers)


async def push_media(request: web.Request) -> web.Response:
    """Answer `POST /v1/media`: encode media before a request uses them."""
    context = request[VISIT].context
    await check_key(request)  # for stored media, no instance would check the key
    raw = await read_json(request)
    context.watched = Watched(context.tenant.name, fingerprint(raw, SEED))
    body, context.cuts = cut_and_parsed(raw, warmup.parse, context.config.max_text_bytes)
    context.model = body.get("model")
    answer = await request.app[WARMUP].push(body, context)
    return as_json(answer, context)


async def forget_media(request: web.Request) -> web.Response:
    """Answer `DELETE /v1/media/{uuid}?model=…`: forget the name of the client's media."""
    context = request[VISIT].context
    await check_key(request)
    uuid, context.model = request.match_info["uuid"], request.query.get("model")
    await request.app[PIPELINE].forget(uuid, context.model, context)
    return as_json({"id": uuid, "object": "media.deleted", "deleted": True}, context)


async def models(request: web.Request) -> web.Response:
    """Answer `GET /v1/models` with the models of one decode instance."""
    return await _of_decode(request, "/v1/models")


async def tokenizer_info(request: web.Request) -> web.Response:
    """Answer `GET /tokenizer_info` as one decode instance does, if it has this route."""
    await check_key(request)  # the instance does not check a key at this path
    return await _of_decode(request, "/tokenizer_info")


async def _of_decode(request: web.Request, path: str) -> web.Response:
    context = request[VISIT].context
    answer = await request.app[ADMIN].of_decode(path, context.headers)
    return web.Response(
        body=answer.body, content_type="application/json", headers=own_headers(context)
    )


async def kept_response(_: web.Request) -> web.StreamResponse:
    """Answer `/v1/responses/{id}` with 404: engines do not store responses.

    Raises:
        RequestRefused: always (404).
    """
    raise RequestRefused(
        404,
        "responses are not kept: send the whole conversation as input",
        slug="unsupported_route",
    )
