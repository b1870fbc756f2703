"""What every request passes: its id and its end, and errors as answers."""

import re
import time
from collections.abc import Sequence

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from epd.bodies.chat import CHAT
from epd.bodies.endpoint import Endpoint
from epd.bodies.endpoints import ENDPOINTS, is_api
from epd.config import ProxyConfig
from epd.edge.access import Access, Headers, client_key
from epd.edge.protocol import Connection
from epd.errors import (
    BadRequest,
    ProxyError,
    RequestRefused,
    UnknownMedia,
    WrongMethod,
    slug_of,
)
from epd.events import RequestDone
from epd.observe.logs import REQUEST_ID as LOGGED
from epd.request.context import RequestContext
from epd.request.ids import request_id
from epd.server.admittance import Visit, served
from epd.server.answers import answer_bytes, broken, error_response, reason_of
from epd.server.keys import check_key
from epd.server.slots import (
    ACCESS,
    ANSWERED,
    CONFIG,
    CONTEXT,
    KEYS,
    MODELS,
    OBSERVERS,
    ROUTE,
    STREAM,
    TRACER,
    UNKNOWN,
)
from epd.spans import RequestSpan, Tracer

ADMINISTRATIVE = frozenset({Access.ADMIN, Access.REGISTRAR})
"""Routes that the admin key opens."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""Of W3C trace context: they go on as they are, where the proxy has no spans of its own."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

CLIENT_CLOSED = 499
"""nginx's status for a client that left before its answer; logged, never sent."""


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, and tell the observers how it ended."""
    started, app, route = time.monotonic(), request.app, _route(request)
    access = app[ACCESS].get(request.match_info.handler, Access.TENANT)  # no route: closed as most
    context = request[CONTEXT] = _context(request, app, access, route)
    status, error, response = CLIENT_CLOSED, None, None
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
            path=request.get(ROUTE, route),
            status=status,
            seconds=time.monotonic() - started,
            error=_left(request) if status == CLIENT_CLOSED else slug_of(error),
            reason=reason_of(error),
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
            policy=record.policy,
            stream=STREAM in request,
            answer_bytes=answer_bytes(response, context),
            tenant=context.tenant.name,
        )
        if context.span is not None:
            context.span.done(event)
        for observer in context.observers:
            observer.request_done(event)
        LOGGED.reset(logged)


async def _answered(
    request: web.Request, handler: Handler, visit: Visit
) -> tuple[web.StreamResponse, ProxyError | None]:
    """The answer, and the error that it is or ends in; every error in the endpoint's shape."""
    try:
        return await served(request, handler, visit), None
    except UnknownMedia as failure:
        error = await _if_key_is_accepted(request, failure)
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
        return await broken(request, stream, error), error
    return error_response(request, error, visit.context), error


async def _if_key_is_accepted(request: web.Request, error: ProxyError) -> ProxyError:
    """The error, or the refusal of a client's key that no instance has judged yet.

    Else a client without a key could find out which media names there are.
    """
    try:
        await check_key(request)
    except ProxyError as refusal:
        return refusal
    return error


def _context(
    request: web.Request, app: web.Application, access: Access, route: str
) -> RequestContext:
    config, headers, keyed = app[CONFIG].current, request.headers, app.get(KEYS) is not None
    tracer = app.get(TRACER)
    span = None if tracer is None else _span(tracer, request, route)
    client_id, endpoint = _client_id(headers), _endpoint(route, request.path)
    own_keys = keyed or (access in ADMINISTRATIVE and config.admin_api_key is not None)
    presented = "Authorization" in headers or endpoint.key_header in headers
    return RequestContext(
        request_id=request_id(client_id),
        client_id=client_id,
        headers=_forwarded(headers, config, span, endpoint.key_header, own_keys=own_keys),
        config=config,
        endpoint=endpoint,
        span=span,
        # Whether it is the client's own key, or none, that the instances see.
        clients_key=not keyed and (presented or config.openai_api_key is None),
        observers=app[OBSERVERS],
        models=app[MODELS],
        client_headers=headers,
        session=headers.get(config.session_header, ""),
    )


def _endpoint(route: str, path: str) -> Endpoint:
    """The one asked for; where there is none, the one it is under, whose clients read the error."""
    if (endpoint := ENDPOINTS.get(route)) is not None:
        return endpoint
    under = (one for one in ENDPOINTS.values() if f"{path}/".startswith(f"{one.path}/"))
    return next(under, CHAT)


def _client_id(headers: Headers) -> str | None:
    match headers.getall("x-request-id", ()):
        case [given] if REQUEST_ID.fullmatch(given):
            return given
        case _:
            return None


def _span(tracer: Tracer, request: web.Request, route: str) -> RequestSpan | None:
    if not is_api(route):
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
