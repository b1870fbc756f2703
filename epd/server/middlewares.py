"""What every request passes: its id and its end, errors as answers, API keys, its turn."""

import asyncio
import math
import re
import secrets
import select
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, get_args

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from epd.bodies.chat import CHAT
from epd.bodies.endpoints import ENDPOINTS
from epd.config import ProxyConfig
from epd.edge.access import Access, Headers, check_admin, check_registrar, client_key
from epd.edge.admission import Admission, Held, max_body_bytes
from epd.edge.body import too_large
from epd.edge.drain import DRAIN
from epd.edge.protocol import SERVER, Connection
from epd.errors import (
    BadRequest,
    ProxyError,
    RequestRefused,
    Unauthorized,
    UpstreamRejected,
    WrongMethod,
)
from epd.events import ItemResult, Observer, RequestDone, stage_seconds
from epd.models import ModelNames
from epd.observe.logs import REQUEST_ID as LOGGED
from epd.request.context import RequestContext
from epd.spans import RequestSpan, Tracer
from epd.tenants import ApiKeys

CONFIG = web.AppKey("config", ProxyConfig)
KEYS = web.AppKey("keys", ApiKeys)
"""There only where keys are configured."""
ACCESS = web.AppKey("access", Mapping[object, Access])
"""Whom each handler answers."""
ADMISSION = web.AppKey("admission", Admission)
OBSERVERS = web.AppKey("observers", Sequence[Observer])
MODELS = web.AppKey("models", ModelNames)
TRACER = web.AppKey("tracer", Tracer)
"""There only where requests are traced."""
CONTEXT = web.RequestKey("context", RequestContext)
BODY = web.RequestKey("body", Held)
"""What the body is counted with as it is read."""
STREAM = web.RequestKey("stream", web.StreamResponse)
"""Its answer, where that is a stream."""
ANSWERED = web.RequestKey("answered", int)
"""Its status, set once the client has all of its answer and may leave."""

ADMINISTRATIVE = frozenset({Access.ADMIN, Access.REGISTRAR})
"""Routes that the admin key opens."""

UNKNOWN = "unknown"
"""The name of what is no route."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""Of W3C trace context: they go on as they are, where the proxy has no spans of its own."""
TIMEOUT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
"""A client's x-request-timeout, in seconds."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

LOOK_S = 0.1
"""Between two looks at whether a client that waits is still there."""

CLIENT_CLOSED = 499
"""nginx's status for a client that left before its answer; logged, never sent."""


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, and tell the observers how it ended."""
    started, app, route = time.monotonic(), request.app, _route(request)
    access = app[ACCESS].get(request.match_info.handler, Access.TENANT)  # no route: closed as most
    context = request[CONTEXT] = _context(request, app, access, route)
    status, error = CLIENT_CLOSED, None
    logged = LOGGED.set(context.client_id or context.request_id)
    try:
        visit = Visit(app, context, route, access, started)
        response, error = await _answered(request, handler, visit)
        status = response.status
        return response
    finally:
        if status == CLIENT_CLOSED:
            status = request.get(ANSWERED, CLIENT_CLOSED)
        record = context.record
        first_s = record.first_event_s
        event = RequestDone(
            request_id=context.client_id or context.request_id,
            engine_id=context.request_id,
            method=request.method,
            path=route,
            status=status,
            seconds=time.monotonic() - started,
            error=_left(request) if status == CLIENT_CLOSED else _slug(error),
            reason=_reason(error),
            stages=tuple(record.stages),
            items=record.items,
            retries=record.retries,
            degraded=frozenset(record.degraded),
            kv_wait_s=record.kv_wait_s,
            model_name=context.model_name,
            at=record.at,
            first_token_s=None if first_s is None else first_s - started,
            gaps=record.gaps,
            hits=record.hits,
            waits=record.waits,
            saved_bytes=record.saved_bytes,
            trace_id=None if context.span is None else context.span.trace_id,
        )
        if context.span is not None:
            context.span.done(event)
        for observer in context.observers:
            observer.request_done(event)
        LOGGED.reset(logged)


class Visit(NamedTuple):
    """What is known of a request by its head.

    Attributes:
        app: the application that serves it.
        context: what it carries through the stages.
        route: its route's path.
        access: whom that answers.
        started_s: when it came, on the monotonic clock.
    """

    app: web.Application
    context: RequestContext
    route: str
    access: Access
    started_s: float


async def _answered(
    request: web.Request, handler: Handler, visit: Visit
) -> tuple[web.StreamResponse, ProxyError | None]:
    """The answer, and the error that it is or ends in; every error in the endpoint's shape."""
    try:
        return await _served(request, handler, visit), None
    except ProxyError as failure:
        error = failure
    except web.RequestPayloadError:
        error = BadRequest("the body is not what its headers say", slug="invalid_body")
    except web.HTTPMethodNotAllowed as failure:
        error = WrongMethod(failure.allowed_methods)
    except web.HTTPException as failure:
        error = RequestRefused(failure.status, failure.reason, slug="unknown_route")
    except ConnectionError:  # the client's; an instance's is a ProxyError
        raise
    except Exception:  # noqa: BLE001 - the last resort: logged whole, answered like others
        structlog.get_logger("epd").exception("bug", next="the client is answered 500")
        error = ProxyError("the proxy failed; its log says why")
    stream = request.get(STREAM)
    if stream is not None and stream.prepared:
        return await _broken(request, stream, error), error
    return _error_response(request, error, visit.context), error


async def _broken(
    request: web.Request, stream: web.StreamResponse, error: ProxyError
) -> web.StreamResponse:
    """A stream whose status has gone out, ended by its error, unless it has ended already."""
    if ANSWERED not in request:
        await stream.write(request[CONTEXT].endpoint.error_event(error))
        await stream.write_eof()
    return stream


def _error_response(
    request: web.Request, error: ProxyError, context: RequestContext
) -> web.Response:
    response = web.Response(
        status=error.status,
        body=context.endpoint.error(error),
        content_type="application/json",
        headers={**error.headers, **own_headers(context)},
    )
    if not request.content.is_eof():  # nobody reads the rest of its body
        response.force_close()
    return response


async def _served(request: web.Request, handler: Handler, visit: Visit) -> web.StreamResponse:
    """Let a request in that may come, when there is a place for it, for as long as it has.

    Health and metrics are asked for when it matters most: they need no place.
    """
    app, context = visit.app, visit.context
    api = visit.access is Access.TENANT and visit.route != UNKNOWN
    costly = api and request.method == "POST"
    until_s = visit.started_s + _limit_s(request, app[CONFIG]) if costly else math.inf
    async with app[DRAIN].bounded(until_s):
        _authenticate(request, visit)
        admission = app[ADMISSION]
        with admission.body(context.tenant) as request[BODY]:
            if api:
                admission.keep_pace(context.tenant)
            if not costly:
                return await handler(request)
            return await _in_turn(request, handler, visit)


def _authenticate(request: web.Request, visit: Visit) -> None:
    """Let nobody further than a route's class of access says."""
    keys = visit.app.get(KEYS)
    if visit.access is Access.ADMIN:
        _check_admin(request)
    elif visit.access is Access.REGISTRAR:
        check_registrar(visit.app[CONFIG].admin_api_key, request.headers)
    elif visit.access is Access.TENANT and keys is not None:
        header = visit.context.endpoint.key_header
        tenant = keys.tenant_of(client_key(request.headers, header))
        if tenant is None:
            form = "Bearer <key>" if header == "Authorization" else "<key>"
            raise Unauthorized(f"a valid API key is needed: {header}: {form}")
        visit.context.tenant = tenant


def _check_admin(request: web.Request) -> None:
    peer = request.get_extra_info("peername")
    address = peer[0] if isinstance(peer, tuple) else None
    check_admin(request.app[CONFIG].admin_api_key, request.headers, address)


def may_administer(request: web.Request) -> bool:
    """Whether it could use the operator's routes, whichever it uses."""
    try:
        _check_admin(request)
    except (Unauthorized, RequestRefused):
        return False
    return True


async def _in_turn(request: web.Request, handler: Handler, visit: Visit) -> web.StreamResponse:
    """Let a request in when there is a place for it."""
    admission, context = visit.app[ADMISSION], visit.context
    limit = max_body_bytes(visit.app[CONFIG])
    if (size := request.content_length or 0) > limit:
        raise too_large(limit)
    with admission.arrive(context.tenant) as ticket:
        if ticket.where == "queue":
            with context.timed("queue", "proxy"):
                async with _watched(request):
                    await admission.turn(ticket)
            context.record.at = "proxy"
        request[BODY].grow(size)
        return await handler(request)


def _limit_s(request: web.Request, config: ProxyConfig) -> float:
    """How long the whole request may take, its wait for its turn included."""
    asked = request.headers.get("x-request-timeout")
    if asked is not None and TIMEOUT.fullmatch(asked):
        return min(config.request_timeout_s, float(asked))
    return config.request_timeout_s


@asynccontextmanager
async def _watched(request: web.Request) -> AsyncIterator[None]:
    """Notice that the client leaves, though nothing of its body is read.

    aiohttp stops reading where a body comes that nobody takes, and then does not see its end.
    """
    watcher = asyncio.create_task(_watch(request))
    try:
        yield
    finally:
        watcher.cancel()


async def _watch(request: web.Request) -> None:
    if (transport := request.transport) is None:  # it has left
        return
    peer = select.poll()
    peer.register(transport.get_extra_info("socket"), select.POLLRDHUP)
    while not peer.poll(0):  # noqa: ASYNC110 - the loop watches no socket twice
        await asyncio.sleep(LOOK_S)
    transport.abort()  # at which aiohttp cancels the request


def own_headers(context: RequestContext) -> dict[str, str]:
    """Headers of every answer."""
    record = context.record
    own = {"X-Request-Id": context.client_id or context.request_id, "Server": SERVER}
    if context.span is not None:
        own["X-Trace-Id"] = context.span.trace_id
    if record.stages:
        spans = stage_seconds(record.stages)
        own["Server-Timing"] = ", ".join(
            [f"{stage};dur={seconds * 1000:.1f}" for stage, seconds in spans.items()]
        )
    if record.items:
        own["x-epd-items"] = ",".join(
            f"{result}={record.items.get(result, 0)}" for result in get_args(ItemResult)
        )
    if record.degraded:
        own["x-epd-degraded"] = ",".join(sorted(record.degraded))
    return own


def _context(
    request: web.Request, app: web.Application, access: Access, route: str
) -> RequestContext:
    config, headers, keyed = app[CONFIG], request.headers, app.get(KEYS) is not None
    tracer = app.get(TRACER)
    span = None if tracer is None else _span(tracer, request, route)
    client_id, endpoint = _client_id(headers), ENDPOINTS.get(route, CHAT)
    own_keys = keyed or (access in ADMINISTRATIVE and config.admin_api_key is not None)
    presented = "Authorization" in headers or endpoint.key_header in headers
    return RequestContext(
        request_id=_request_id(client_id),
        client_id=client_id,
        headers=_forwarded(headers, config, span, endpoint.key_header, own_keys=own_keys),
        endpoint=endpoint,
        span=span,
        # Whether it is the client's own key, or none, that the instances see.
        clients_key=not keyed and (presented or config.openai_api_key is None),
        observers=app[OBSERVERS],
        models=app[MODELS],
        session=headers.get(config.session_header, ""),
    )


def _client_id(headers: Headers) -> str | None:
    match headers.getall("x-request-id", ()):
        case [given] if REQUEST_ID.fullmatch(given):
            return given
        case _:
            return None


def _request_id(client_id: str | None) -> str:
    """An id of our own, which begins with the client's, so that a search for that finds it.

    A client may use one id twice at a time. An engine or a KV connector that goes by the id would
    take two such requests for one.
    """
    return secrets.token_hex(16) if client_id is None else f"{client_id}-{secrets.token_hex(4)}"


def _span(tracer: Tracer, request: web.Request, route: str) -> RequestSpan | None:
    """What a request to the API is traced by; health, metrics and what is no route are not."""
    if not route.startswith("/v1/"):
        return None
    return tracer.request(request.method, route, _kept(request.headers, TRACE_HEADERS))


def _forwarded(
    headers: Headers,
    config: ProxyConfig,
    span: RequestSpan | None,
    key_header: str,
    *,
    own_keys: bool,
) -> dict[str, str]:
    # A key that opens this proxy is none of the instances' business.
    names = () if own_keys else ("Authorization",)
    if span is None:
        kept = _kept(headers, (*names, *TRACE_HEADERS))
    else:
        kept = {**_kept(headers, names), **span.headers}
    if not own_keys and "Authorization" not in headers and key_header in headers:
        kept["Authorization"] = f"Bearer {client_key(headers, key_header)}"  # all that vLLM reads
    if config.openai_api_key is not None:
        kept.setdefault("Authorization", f"Bearer {config.openai_api_key.get_secret_value()}")
    return kept


def _kept(headers: Headers, names: Sequence[str]) -> dict[str, str]:
    # W3C trace context allows several tracestate headers, which are one list.
    return {name: ",".join(headers.getall(name)) for name in names if name in headers}


def _route(request: web.Request) -> str:
    """The route's path as it was declared: what a client asked for could be anything."""
    resource = request.match_info.route.resource
    return UNKNOWN if resource is None or resource.name == UNKNOWN else resource.canonical


def _left(request: web.Request) -> str:
    connection = request.protocol
    stalled = isinstance(connection, Connection) and connection.stalled
    return "client_stalled" if stalled else "client_closed"


def _slug(error: ProxyError | None) -> str | None:
    return None if error is None else error.slug


def _reason(error: ProxyError | None) -> str | None:
    """What lies behind an error; not what an instance said, which may quote the prompt."""
    if error is None or isinstance(error, UpstreamRejected):
        return None
    cause = error.__cause__
    return error.message if cause is None else f"{error.message}: {_kind(cause)}"


def _kind(cause: BaseException) -> str:
    """What can be logged of a library's error: its type, and the operating system's words.

    Others hold whole requests and answers: headers with keys, URLs with queries, bytes.
    """
    name = type(cause).__name__
    return f"{name}: {cause}" if isinstance(cause, OSError) else name
