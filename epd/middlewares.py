"""What every request passes: its id and its end, errors as answers, API keys."""

import asyncio
import re
import secrets
import select
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import get_args

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from epd.access import Access, Headers, bearer, check_admin
from epd.admission import Admission, Held
from epd.body import too_large
from epd.config import ProxyConfig
from epd.drain import end_in_time
from epd.errors import (
    BadRequest,
    ProxyError,
    RequestRefused,
    Unauthorized,
    UpstreamRejected,
    UpstreamTimeout,
    WrongMethod,
)
from epd.events import ItemResult, Observer, RequestDone, stage_seconds
from epd.protocol import SERVER, Connection
from epd.stages import RequestContext
from epd.tenants import ApiKeys

CONFIG = web.AppKey("config", ProxyConfig)
KEYS = web.AppKey("keys", ApiKeys)
"""There only where keys are configured."""
ACCESS = web.AppKey("access", Mapping[object, Access])
"""Whom each handler answers."""
ADMISSION = web.AppKey("admission", Admission)
OBSERVERS = web.AppKey("observers", Sequence[Observer])
CONTEXT = web.RequestKey("context", RequestContext)
BODY = web.RequestKey("body", Held)
"""What the body is counted with as it is read."""
STARTED_S = web.RequestKey("started_s", float)
"""When it came, on the event loop's clock."""
ANSWERED = web.RequestKey("answered", int)
"""Its status, set once the client has all of its answer and may leave."""
OUTCOME = web.RequestKey("outcome", ProxyError)
"""Set where a stream broke after its status had gone out."""

UNKNOWN = "unknown"
"""The name of what is no route."""

FORWARDED_HEADERS = ("traceparent", "tracestate")
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
    clock = asyncio.get_running_loop().time
    started = clock()
    config, observers = request.app[CONFIG], request.app[OBSERVERS]
    client_id = _client_id(request.headers)
    context = RequestContext(
        request_id=_request_id(client_id),
        client_id=client_id,
        headers=_forwarded(request.headers, config, own_keys=_keeps_keys(request)),
        clients_key=_passes_key(request, config),
        observers=observers,
    )
    request[CONTEXT] = context
    request[STARTED_S] = started
    status, error = CLIENT_CLOSED, None
    try:
        response = await handler(request)
        status, error = response.status, request.get(OUTCOME)
        return response
    finally:
        if status == CLIENT_CLOSED:
            status = request.get(ANSWERED, CLIENT_CLOSED)
        event = RequestDone(
            request_id=context.client_id or context.request_id,
            engine_id=context.request_id,
            method=request.method,
            path=_route(request),
            status=status,
            seconds=clock() - started,
            error=_left(request) if status == CLIENT_CLOSED else error and error.slug,
            reason=_reason(error),
            stages=tuple(context.stages),
            items=dict(context.items),
            retries=context.retries,
            degraded=frozenset(context.degraded),
            kv_wait_s=context.kv_wait_s,
        )
        for observer in observers:
            observer.request_done(event)


@web.middleware
async def render_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in OpenAI's shape."""
    try:
        return await handler(request)
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
    except Exception:  # noqa: BLE001 - the last resort: logged whole, answered in OpenAI's shape
        structlog.get_logger("epd").exception("bug", request_id=request[CONTEXT].request_id)
        error = ProxyError("the proxy failed; its log says why")
    request[OUTCOME] = error
    response = web.Response(
        status=error.status,
        body=error.body(),
        content_type="application/json",
        headers={**error.headers, **own_headers(request[CONTEXT])},
    )
    if not request.content.is_eof():  # nobody reads the rest of its body
        response.force_close()
    return response


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let nobody further than a route's class of access says."""
    access, keys = _access(request), request.app.get(KEYS)
    if access is Access.ADMIN:
        peer = request.get_extra_info("peername")
        address = peer[0] if isinstance(peer, tuple) else None
        check_admin(request.app[CONFIG].admin_api_key, request.headers, address)
    elif access is Access.TENANT and keys is not None:
        tenant = keys.tenant_of(bearer(request.headers))
        if tenant is None:
            raise Unauthorized("a valid API key is needed: Authorization: Bearer <key>")
        request[CONTEXT].tenant = tenant
    return await handler(request)


def _access(request: web.Request) -> Access:
    """The access of the request's route; what is no route is as closed as most are."""
    return request.app[ACCESS].get(request.match_info.handler, Access.TENANT)


def _keeps_keys(request: web.Request) -> bool:
    """Whether a client's key is one that opens this proxy."""
    if _access(request) is Access.ADMIN and request.app[CONFIG].admin_api_key is not None:
        return True
    return KEYS in request.app


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request in when there is a place for it, and count its body while it is here."""
    admission, context, route = request.app[ADMISSION], request[CONTEXT], _route(request)
    with admission.body(context.tenant) as request[BODY]:
        if not route.startswith("/v1/"):  # health and metrics are asked for when it matters most
            return await handler(request)
        admission.keep_pace(context.tenant)
        if request.method != "POST":
            return await handler(request)
        if (size := request.content_length or 0) > request.client_max_size:
            raise too_large(request.client_max_size)
        with admission.arrive(context.tenant) as ticket:
            if ticket.where == "queue":
                with context.timed("queue", "proxy"):
                    async with _watched(request), deadline(request):
                        await admission.turn(ticket)
            request[BODY].grow(size)
            return await handler(request)


@asynccontextmanager
async def deadline(request: web.Request) -> AsyncIterator[None]:
    """The whole request's, its wait for its turn included.

    Raises:
        UpstreamTimeout: it has passed.
    """
    limit_s = request.app[CONFIG].request_timeout_s
    asked = request.headers.get("x-request-timeout", "")
    if TIMEOUT.fullmatch(asked):
        limit_s = min(limit_s, float(asked))
    try:
        async with asyncio.timeout_at(request[STARTED_S] + limit_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise UpstreamTimeout(
            "the request did not end in time", slug="request_timeout", stage="proxy"
        ) from None


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
    own = {"X-Request-Id": context.client_id or context.request_id, "Server": SERVER}
    timing = ", ".join(
        f"{stage};dur={seconds * 1000:.1f}"
        for stage, seconds in stage_seconds(context.stages).items()
    )
    items = ",".join(f"{result}={context.items[result]}" for result in get_args(ItemResult))
    return (
        own
        | ({"Server-Timing": timing} if timing else {})
        | ({"x-epd-items": items} if context.items else {})
        | ({"x-epd-degraded": ",".join(sorted(context.degraded))} if context.degraded else {})
    )


def _passes_key(request: web.Request, config: ProxyConfig) -> bool:
    """Whether it is the client's own key, or none, that the instances see."""
    given = "Authorization" in request.headers or config.openai_api_key is None
    return KEYS not in request.app and given


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
    return uuid.uuid4().hex if client_id is None else f"{client_id}-{secrets.token_hex(4)}"


def _forwarded(headers: Headers, config: ProxyConfig, *, own_keys: bool) -> dict[str, str]:
    # A key that opens this proxy is none of the instances' business.
    names = FORWARDED_HEADERS if own_keys else ("Authorization", *FORWARDED_HEADERS)
    # W3C trace context allows several tracestate headers, which are one list.
    kept = {name: ",".join(headers.getall(name)) for name in names if name in headers}
    if config.openai_api_key is not None:
        kept.setdefault("Authorization", f"Bearer {config.openai_api_key.get_secret_value()}")
    return kept


def _route(request: web.Request) -> str:
    """The route's path as it was declared: what a client asked for could be anything."""
    resource = request.match_info.route.resource
    return UNKNOWN if resource is None or resource.name == UNKNOWN else resource.canonical


def _left(request: web.Request) -> str:
    connection = request.protocol
    stalled = isinstance(connection, Connection) and connection.stalled
    return "client_stalled" if stalled else "client_closed"


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


MIDDLEWARES = (observe, render_errors, end_in_time, authenticate, admit)
"""The outer one first."""
