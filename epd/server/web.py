"""The aiohttp application: routes, and the answer relayed to the client."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import orjson
from aiohttp import web

from epd.bodies.endpoints import ENDPOINTS
from epd.bodies.items import Body
from epd.bodies.parsing import cut_and_parsed, parse_json
from epd.bodies.prompts import CONVERSATION, conversation_id
from epd.cache.identity import conversation_key, salted
from epd.config import ProxyConfig
from epd.conversations import time_to_live
from epd.conversations.turn import Turn
from epd.edge.access import Access
from epd.edge.admission import Admission, limits_of
from epd.edge.body import read_body
from epd.edge.drain import DRAIN, Drain, send_elsewhere
from epd.errors import NoInstance, Overloaded, RequestRefused
from epd.events import Observer
from epd.http.upstream import Reply
from epd.models import ModelNames
from epd.observe.logs import LogObserver, set_level
from epd.observe.metrics import MetricsObserver
from epd.request import warmup
from epd.request.context import RequestContext
from epd.request.relay import StreamRelay
from epd.routing.health import State
from epd.routing.instances import ANSWERING
from epd.server import ui
from epd.server.admittance import may_administer
from epd.server.answers import own_headers
from epd.server.assembly import (
    ADMIN,
    CONVERSATIONS,
    METRICS,
    PIPELINE,
    POLICIES,
    RECENT,
    ROSTER,
    TABLE,
    WARMUP,
    connections,
)
from epd.server.files import read_keys
from epd.server.middlewares import observe
from epd.server.policies import Policies
from epd.server.reload import RELOAD, Reload
from epd.server.slots import (
    ACCESS,
    ADMISSION,
    ANSWERED,
    BODY,
    CONFIG,
    CONTEXT,
    KEYS,
    MODELS,
    OBSERVERS,
    STREAM,
    UNKNOWN,
)
from epd.tenants import ANONYMOUS
from epd.ui.recent import Recent
from epd.version import __version__

MAX_DECODE_BYTES = 256 * 1024**2
"""Largest answer of decode that is no stream: it is whole before the first byte goes out, so that
what breaks off can still be an error."""

OPENAPI = Path(__file__).with_name("openapi.json").read_bytes()


def create_app(config: ProxyConfig, observers: Sequence[Observer] | None = None) -> web.Application:
    """The proxy as an aiohttp application, to be run or to be mounted in another.

    Run it with `handler_cancellation=True` (`web.run_app`, `web.AppRunner`): that is how a client
    that leaves cancels what runs for it upstream. `epd.edge.protocol.Runner` does, and guards
    against slow and malformed HTTP besides.

    Args:
        config: what `epd serve` makes of its flags.
        observers: told of every event, beside what counts them for `/metrics`; by default they
            are logged.

    Raises:
        KeysInvalid: the keys file cannot be used.
    """
    app = web.Application(middlewares=(observe,))
    app[CONFIG] = config
    app[ADMISSION] = Admission(limits_of(config), time.monotonic)
    keys = read_keys(config)
    if keys is not None:
        app[KEYS] = keys
    app[ACCESS] = dict[object, Access]((route.handler, access) for access, route in ROUTES)
    app.add_routes([route for _, route in ROUTES])
    app.add_routes([_any("/{anything:.*}", nothing, name=UNKNOWN)])
    app[MODELS] = ModelNames()
    app[METRICS] = MetricsObserver(app[ADMISSION])
    app[RECENT] = Recent()
    app[POLICIES] = Policies(config)
    app[RELOAD] = Reload(app[METRICS].reloaded)
    app[DRAIN] = Drain()
    app.on_response_prepare.append(send_elsewhere)
    log = LogObserver(config.kv_lease_s)
    own: tuple[Observer, ...] = (app[METRICS], app[RECENT])
    app[OBSERVERS] = (*own, *((log,) if observers is None else observers))

    def follow(before: ProxyConfig) -> None:
        app[ADMISSION].adopt(limits_of(config))
        app[POLICIES].follow(before)
        set_level(config.log_level)
        log.adopt(config.kv_lease_s)
        time_to_live.warn_of(config, before)

    app[RELOAD].follow(follow)
    app.cleanup_ctx.append(connections)
    return app


async def answer(request: web.Request) -> web.StreamResponse:
    """`POST` to an endpoint, streaming and not."""
    app, context = request.app, request[CONTEXT]
    config, endpoint = app[CONFIG], context.endpoint
    content_type = request.headers.get("Content-Type", "")
    body, context.cuts = endpoint.read(await _read(request), content_type)
    context.model = body.get("model")
    if context.span is not None:
        context.span.asks(endpoint.operation, context.model)
    if endpoint.salted and context.tenant is not ANONYMOUS:  # whom all share with
        body = salted(body, config.scope_of(context.tenant))
    if CONVERSATION in body:
        body, context.turn = await _turn(request, body)
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


async def _turn(request: web.Request, body: Body) -> tuple[Body, Turn | None]:
    """The request as it goes on, and which turn of a conversation it is; None: of none.

    Raises:
        BadRequest: what it calls its conversation is no name.
    """
    app, context, name = request.app, request[CONTEXT], conversation_id(body)
    body = {key: value for key, value in body.items() if key != CONVERSATION}
    if name is None or not context.endpoint.generates:
        return body, None
    key = conversation_key(app[CONFIG].name_scope_of(context.tenant), body, name)
    there = {one.url for one in app[TABLE].of(*ANSWERING) if app[TABLE].state(one) != State.DOWN}
    return body, await app[CONVERSATIONS].begin(key, there)


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


async def _not_yet(_: web.Request) -> None:
    """Leave a client that waits for `100 Continue` waiting: `read_body` says it in time."""


async def _read(request: web.Request) -> bytes | bytearray:
    return await read_body(request, request.app[CONFIG], request[BODY].grow)


async def push_media(request: web.Request) -> web.Response:
    """`POST /v1/media`: has media encoded ahead of the request that asks about them."""
    context = request[CONTEXT]
    body, context.cuts = cut_and_parsed(await _read(request), warmup.parse)
    context.model = body.get("model")
    answer = await request.app[WARMUP].push(body, context)
    return _json(answer, context)


async def forget_media(request: web.Request) -> web.Response:
    """`DELETE /v1/media/{uuid}?model=…`: forgets what the client calls so."""
    context = request[CONTEXT]
    uuid, context.model = request.match_info["uuid"], request.query.get("model")
    await request.app[PIPELINE].forget(uuid, context.model, context)
    return _json({"id": uuid, "object": "media.deleted", "deleted": True}, context)


async def models(request: web.Request) -> web.Response:
    """`GET /v1/models`: the decode side's."""
    context = request[CONTEXT]
    answer = await request.app[ADMIN].models(context.headers)
    return web.Response(
        body=answer.body, content_type="application/json", headers=own_headers(context)
    )


async def health(request: web.Request) -> web.Response:
    """`GET /health`: asks every instance."""
    status, body = await request.app[ADMIN].health()
    return _json(body, request[CONTEXT], status)


async def version(request: web.Request) -> web.Response:
    """`GET /version`: the proxy's, and of each instance vLLM's."""
    instances = await request.app[ADMIN].versions()
    return _json({"version": __version__, "instances": instances}, request[CONTEXT])


async def kept_response(_: web.Request) -> web.StreamResponse:
    """`/v1/responses/{id}`: there is none, as no engine keeps any."""
    raise RequestRefused(
        404,
        "responses are not kept: send the whole conversation as input",
        slug="unsupported_route",
    )


async def openapi(request: web.Request) -> web.Response:
    """`GET /openapi.json`: what there is to be asked."""
    headers = own_headers(request[CONTEXT])
    return web.Response(body=OPENAPI, content_type="application/json", headers=headers)


async def ready(request: web.Request) -> web.Response:
    """`/ready`, `/ping`: whether to send requests here. It asks nobody, and may be asked often."""
    if request.app[DRAIN].began:
        raise Overloaded("the proxy is about to stop", slug="shutting_down")
    decodes = request.app[TABLE].met(*ANSWERING) or request.app[POLICIES].decodes_elsewhere
    if not decodes:
        raise NoInstance("no decode instance can be reached", slug="no_decode")
    return _json({"status": "ready"}, request[CONTEXT])


async def metrics(request: web.Request) -> web.Response:
    """`GET /metrics`, for Prometheus."""
    page, content_type = request.app[METRICS].page(request.headers.get("Accept", ""))
    headers = own_headers(request[CONTEXT]) | {"Content-Type": content_type}
    return web.Response(body=page, headers=headers)


async def instances(request: web.Request) -> web.Response:
    """`GET /instances`: who takes part; to who has the admin key, in detail."""
    return _json(request.app[ROSTER].page(detailed=may_administer(request)), request[CONTEXT])


async def register(request: web.Request) -> web.Response:
    """`POST /instances`: lets an instance take part."""
    body = await _read(request)
    return _json(await request.app[ROSTER].register(bytes(body)), request[CONTEXT])


async def unregister(request: web.Request) -> web.Response:
    """`DELETE /instances?url=…`: takes that back."""
    url = request.query.get("url")
    return _json(await request.app[ROSTER].unregister(url), request[CONTEXT])


async def policies(request: web.Request) -> web.Response:
    """`GET /policies`: which are in force."""
    return _json(request.app[POLICIES].page(), request[CONTEXT])


async def set_policies(request: web.Request) -> web.Response:
    """`PUT /policies`: has these in force, and no others."""
    body = await _read(request)
    return _json(request.app[POLICIES].replace(bytes(body)), request[CONTEXT])


async def add_policy(request: web.Request) -> web.Response:
    """`POST /policies`: has one more in force, or one with other options."""
    body = await _read(request)
    return _json(request.app[POLICIES].add(bytes(body)), request[CONTEXT])


async def remove_policy(request: web.Request) -> web.Response:
    """`DELETE /policies?name=…`: has one in force no longer; without a name, undoes all."""
    name = request.query.get("name")
    return _json(request.app[POLICIES].remove(name), request[CONTEXT])


async def profile(command: str, request: web.Request) -> web.Response:
    """`POST /start_profile` and `/stop_profile`: tells every instance."""
    body = await _read(request)
    if body:
        parse_json(body)
    context = request[CONTEXT]
    headers = context.headers_for(context.request_id)
    return _json(await request.app[ADMIN].profile(command, headers, bytes(body)), context)


def _json(body: object, context: RequestContext, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=orjson.dumps(body, option=orjson.OPT_INDENT_2),
        content_type="application/json",
        headers=own_headers(context),
    )


async def nothing(request: web.Request) -> web.StreamResponse:
    """What is no route, or has other methods. aiohttp's own answer begins with `100 Continue`."""
    routes = [it for it in request.app.router.resources() if it.name != UNKNOWN]
    methods = {method for it in routes for method in (await it.resolve(request))[1]}
    raise web.HTTPMethodNotAllowed(request.method, methods) if methods else web.HTTPNotFound()


_get, _put, _post, _delete, _any = (
    partial(declare, expect_handler=_not_yet)
    for declare in (web.get, web.put, web.post, web.delete, partial(web.route, "*"))
)
ROUTES = (
    (Access.OPEN, _get("/health", health)),  # a load balancer has no key
    (Access.OPEN, _get("/ready", ready)),
    (Access.OPEN, _get("/ping", ready)),  # SageMaker's name for it
    (Access.OPEN, _post("/ping", ready)),
    (Access.OPEN, _get("/openapi.json", openapi)),  # it says nothing of this fleet
    (Access.OPEN, _get("/ui", ui.page)),  # nor do these
    (Access.OPEN, _get("/ui/{file}", ui.asset)),
    (Access.OPEN, _get("/instances", instances)),  # what /health says, without the admin key
    (Access.REGISTRAR, _post("/instances", register)),
    (Access.REGISTRAR, _delete("/instances", unregister)),
    *((Access.TENANT, _post(path, answer)) for path in ENDPOINTS),
    (Access.TENANT, _post("/v1/media", push_media)),
    (Access.TENANT, _delete("/v1/media/{uuid}", forget_media)),
    (Access.TENANT, _get("/v1/responses/{id}", kept_response)),
    (Access.TENANT, _post("/v1/responses/{id}/cancel", kept_response)),
    (Access.TENANT, _get("/v1/models", models)),
    (Access.TENANT, _get("/version", version)),
    (Access.ADMIN, _get("/metrics", metrics)),
    (Access.ADMIN, _get("/ui/state", ui.state)),
    (Access.ADMIN, _get("/policies", policies)),
    (Access.ADMIN, _put("/policies", set_policies)),
    (Access.ADMIN, _post("/policies", add_policy)),
    (Access.ADMIN, _delete("/policies", remove_policy)),
    (Access.ADMIN, _post("/start_profile", partial(profile, "start"))),
    (Access.ADMIN, _post("/stop_profile", partial(profile, "stop"))),
)
"""All there is, and whom it answers. Nothing else reaches an instance: many of vLLM's routes, those
that change its weights or let it sleep among them, want no key of their own."""
