"""Middleware of every request: its id, its record for the observers, and errors."""

import re
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from epd.api.chat import CHAT
from epd.api.endpoint import Endpoint
from epd.api.endpoints import ENDPOINTS, is_api
from epd.config import ProxyConfig
from epd.edge.access import Access, Headers, client_key, single_value
from epd.edge.drain import DRAIN
from epd.edge.protocol import ServerConnection
from epd.errors import (
    BadRequest,
    ProxyError,
    RequestRefused,
    UnknownMedia,
    WrongMethod,
    drop_tracebacks,
)
from epd.observe.logs import REQUEST_ID as LOGGED
from epd.request.recorder import Recorder
from epd.request.request import request_id
from epd.server.app_keys import (
    ACCESS,
    CONFIG,
    KEYS,
    MODELS,
    OBSERVERS,
    TRACER,
    UNKNOWN,
    VISIT,
    Visit,
)
from epd.server.error_responses import UnknownRoute, end_broken_response, error_response, reason_of
from epd.server.intake import serve_request
from epd.server.key_judge import check_key

if TYPE_CHECKING:
    from epd.spans import RequestSpan

ADMINISTRATIVE = frozenset({Access.ADMIN, Access.REGISTRAR})
"""Classes of access of the routes that the admin key opens."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers of W3C trace context. Without tracing, the proxy forwards them unchanged."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Respond to a request that aiohttp's router has resolved."""
    # An unknown path has the class of access of most routes: it needs a key where these do.
    access = request.app[ACCESS].get(request.match_info.handler, Access.TENANT)
    return await respond(request, handler, request.app, access, _route(request))


def direct(app: web.Application, handler: Handler) -> dict[str, Handler]:
    """Return the handlers of `POST` requests to the API's endpoints, by path (`DIRECT`)."""
    respond_to = partial(respond, handler=handler, app=app, access=Access.TENANT)
    return {path: partial(respond_to, route=path) for path in ENDPOINTS}


async def respond(
    request: web.Request, handler: Handler, app: web.Application, access: Access, route: str
) -> web.StreamResponse:
    """Set a request's id, answer the request, and report its end to the observers.

    The handler is called once the request is admitted. `route` is the route's path, or `UNKNOWN`.
    """
    visit = request[VISIT] = _new_visit(request, app, access, route)
    logged = LOGGED.set(visit.record.request_id)
    response, error = None, None
    try:
        response = await serve_request(request, handler, visit)
    except ConnectionError:  # the client's; an instance's is a ProxyError
        raise
    except Exception as failure:  # noqa: BLE001 - the last resort: logged with its trace, answered 500
        error = await _error_of(failure, request)
        if visit.stream is not None and visit.stream.prepared:
            response = await end_broken_response(request, visit, visit.stream, error)
        else:
            response = error_response(request, error, visit)
    finally:
        _end_record(request, visit, response, error)
        LOGGED.reset(logged)
        drop_tracebacks(error)
    if app[DRAIN].began and not response.prepared:
        response.force_close()  # the client's next request goes to another process
    return response


def _end_record(
    request: web.Request,
    visit: Visit,
    response: web.StreamResponse | None,
    error: ProxyError | None,
) -> None:
    status = visit.answered if response is None else response.status
    slug = reason = None
    if status is None:
        connection = request.protocol
        stalled = isinstance(connection, ServerConnection) and connection.stalled
        slug = "client_stalled" if stalled else "client_closed"
    elif error is not None:
        slug, reason = error.slug, reason_of(error)
    if isinstance(response, web.Response) and isinstance(response.body, bytes | bytearray):
        visit.record.set_answer(len(response.body))
    visit.record.end_request(status, slug, reason)


async def _error_of(failure: Exception, request: web.Request) -> ProxyError:
    if isinstance(failure, UnknownMedia):
        try:  # a client with an invalid key must not find out which names of media exist
            await check_key(request)
        except ProxyError as refusal:
            return refusal
    match failure:
        case ProxyError():
            return failure
        case web.RequestPayloadError():
            return BadRequest("the body is not what its headers say", slug="invalid_body")
        case web.HTTPMethodNotAllowed():
            return WrongMethod(failure.allowed_methods)
        case web.HTTPException():
            return RequestRefused(failure.status, failure.reason, slug="unknown_route")
        case _:
            structlog.get_logger("epd").error("bug", exc_info=failure, next="the client gets a 500")
            return ProxyError("the proxy failed: see the error in its log")


def _new_visit(request: web.Request, app: web.Application, access: Access, route: str) -> Visit:
    started_s = time.monotonic()
    config, headers, keyed = app[CONFIG], request.headers, app.get(KEYS) is not None
    endpoint = ENDPOINTS.get(route) or _endpoint_above(request.path)
    tracer = app.get(TRACER)
    span = None
    if tracer is not None and is_api(route):
        span = tracer(request.method, route, _selected(headers, TRACE_HEADERS))
    header = single_value(headers, "x-request-id")
    client_id = header if header and REQUEST_ID.fullmatch(header) else None
    engine_id = request_id(client_id)
    key_for_proxy = keyed or (config.admin_api_key is not None and access in ADMINISTRATIVE)
    presented = "Authorization" in headers or endpoint.key_header in headers
    record = Recorder(
        client_id or engine_id,
        request.method,
        route,
        engine_id,
        trace_id=None if span is None else span.trace_id,
        started_s=started_s,
        endpoint=endpoint.path,
        observers=app[OBSERVERS],
        models=app[MODELS],
        span=span,
    )
    return Visit(
        app,
        config,
        access,
        access is Access.TENANT and route != UNKNOWN,
        engine_id,
        endpoint,
        _forwarded(headers, config, span, endpoint.key_header, key_for_proxy=key_for_proxy),
        # True if the instances get the client's own key, or no key.
        not keyed and (presented or config.openai_api_key is None),
        record,
    )


def _endpoint_above(path: str) -> Endpoint:
    """Return the endpoint above a path, which determines the shape of an error."""
    above = (other for other in ENDPOINTS.values() if f"{path}/".startswith(f"{other.path}/"))
    return next(above, CHAT)


def _forwarded(
    headers: Headers,
    config: ProxyConfig,
    span: "RequestSpan | None",
    key_header: str,
    *,
    key_for_proxy: bool,
) -> dict[str, str]:
    # A key for this proxy is not forwarded to the instances.
    names = () if key_for_proxy else ("Authorization",)
    if span is None:
        forwarded = _selected(headers, (*names, *TRACE_HEADERS))
    else:
        forwarded = {**_selected(headers, names), **span.headers}
    if not key_for_proxy and "Authorization" not in headers and key_header in headers:
        # vLLM reads no other header.
        forwarded["Authorization"] = f"Bearer {client_key(headers, key_header)}"
    if config.openai_api_key is not None:
        forwarded.setdefault("Authorization", f"Bearer {config.openai_api_key.get_secret_value()}")
    return forwarded


def _selected(headers: Headers, names: Sequence[str]) -> dict[str, str]:
    # W3C trace context allows several tracestate headers: they form one list.
    return {name: ",".join(headers.getall(name)) for name in names if name in headers}


def _route(request: web.Request) -> str:
    """Return the route's declared path: the path of the request has unbounded values."""
    resource = request.match_info.route.resource
    return UNKNOWN if resource is None or resource.name == UNKNOWN else resource.canonical


async def answer_unknown(request: web.Request) -> web.Response:
    """Answer a request for an unknown path, or with a method that its path does not have.

    aiohttp's own handler would send `100 Continue` first.

    Raises:
        UnknownRoute: the path has no route.
        HTTPMethodNotAllowed: the path has routes for other methods.
    """
    methods = set[str]()
    for route in request.app.router.resources():
        if route.name != UNKNOWN and (allowed := (await route.resolve(request))[1]):
            methods |= allowed
            request[VISIT].record.set_path(route.canonical)
    if not methods:
        raise UnknownRoute(request.rel_url.raw_path)
    raise web.HTTPMethodNotAllowed(request.method, methods - {request.method})
