"""Intake of a request: the check of its key, its wait for a place, and the reading of its body."""

import asyncio
import math
import os
import re
import secrets
import select
import socket
import struct
from collections.abc import Mapping

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.typedefs import Handler

from epd.api.body import check_json_type
from epd.api.items import Body
from epd.config.sections import ConfigFields
from epd.conversations.prompts import CONVERSATION, conversation_id
from epd.conversations.turn import Turn
from epd.edge import engine_headers
from epd.edge.access import (
    Access,
    Headers,
    check_admin,
    check_registrar,
    client_key,
    is_loopback,
)
from epd.edge.admission import Admission, AdmittedRequest, Slot
from epd.edge.drain import DRAIN
from epd.encoder_cache.identity import conversation_key, with_salt
from epd.errors import RequestRefused, Unauthorized
from epd.request.context import RequestContext
from epd.routing.fatal import fingerprint
from epd.routing.watched import Watched
from epd.server.app_keys import ADMISSION, KEYS, VISIT, Visit
from epd.tenants import ANONYMOUS

GRACE_S = 5.0
"""Seconds before the minimum rate of a body applies: clients may create it while they send it."""

SEED = secrets.randbits(64)
"""Seed of this process for the fingerprints of bodies."""

UCRED = struct.Struct("3i")
"""Process, user and group of the other end of a Unix socket, as the kernel writes them."""

PRIORITY = "priority"
"""Field of a request: its priority among the requests that wait at an engine."""

LOOK_S = 0.1
"""Seconds between two checks whether the client of a queued request is still connected."""

OTHER_HEADER = "X-API-Key"
"""Header in which Anthropic's clients and operators send their keys."""

TIMEOUT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
"""Form of a client's `x-request-timeout`, in seconds."""


async def serve_request(request: web.Request, handler: Handler, visit: Visit) -> web.StreamResponse:
    """Authenticate a request, wait for a place if it needs one, and answer it before its deadline.

    Only `POST` requests to the API need a place: health and metrics must answer under overload.
    """
    app, context, config = visit.app, visit.context, visit.context.config
    costly = visit.api and request.method == "POST"
    until_s = context.record.started_s + _limit_s(request, config) if costly else math.inf
    with app[DRAIN].bound_request(until_s):
        _authenticate(request, visit)
        admission = app[ADMISSION]
        with admission.request(context.tenant) as admitted:
            context.held = visit.admitted = admitted
            if visit.api:
                admission.keep_pace(context.tenant)
            if costly:
                size, limit = request.content_length or 0, config.worker_max_body_bytes
                if size > limit:
                    raise _too_large(limit)
                ticket = admitted.enter_queue()
                if ticket.where == "queue":
                    await _queued(request, admission, ticket, context)
                if size:
                    admitted.check_room(size)
            return await handler(request)


def _limit_s(request: web.Request, config: ConfigFields) -> float:
    """Return how long the whole request may take, in seconds, its wait in the queue included."""
    asked = request.headers.get("x-request-timeout")
    if asked is not None and TIMEOUT.fullmatch(asked):
        return min(config.request_timeout_s, float(asked))
    return config.request_timeout_s


def _authenticate(request: web.Request, visit: Visit) -> None:
    keys = visit.app.get(KEYS)
    if visit.access is Access.ADMIN:
        _check_admin(request)
    elif visit.access is Access.REGISTRAR:
        check_registrar(visit.context.config.admin_api_key, request.headers)
    elif visit.access is Access.TENANT and keys is not None:
        header = visit.context.endpoint.key_header
        tenant = keys.tenant_of(client_key(request.headers, header))
        if tenant is None:
            raise Unauthorized(_key_error(header, visit.context.client_headers))
        visit.context.tenant = tenant
        visit.context.record.tenant = tenant.name


def _key_error(header: str, headers: Mapping[str, str]) -> str:
    """Return the error message for an invalid or missing key, which this header must carry."""
    form = "Bearer <key>" if header == "Authorization" else "<key>"
    wanted = f"a valid API key is required: {header}: {form}"
    if header == "Authorization" and OTHER_HEADER in headers:
        return f"{wanted} ({OTHER_HEADER} is not accepted on this route)"
    return wanted


def _check_admin(request: web.Request) -> None:
    config = request[VISIT].context.config
    key = config.admin_api_key
    check_admin(key, request.headers, private=key is None and _is_private(request, config))


def _is_private(request: web.Request, config: ConfigFields) -> bool:
    """Return whether the connection comes from this machine, on an address for it alone.

    On a Unix socket it must come from the proxy's own user: a reverse proxy runs as another one.
    """
    if config.uds is None:
        peer = request.get_extra_info("peername")
        return is_loopback(config.host) and isinstance(peer, tuple) and is_loopback(peer[0])
    opened: socket.socket | None = request.get_extra_info("socket")
    if opened is None:  # the client has disconnected
        return False
    credentials = opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
    user: int = UCRED.unpack(credentials)[1]
    return user == os.geteuid()


def may_administer(request: web.Request) -> bool:
    """Return whether the request's key and address open the operator's routes."""
    try:
        _check_admin(request)
    except (Unauthorized, RequestRefused):
        return False
    return True


async def _queued(
    request: web.Request, admission: Admission, ticket: Slot, context: RequestContext
) -> None:
    watcher = asyncio.create_task(_watch(request))
    try:
        with context.time_stage("queue", "proxy"):
            await admission.wait_place(ticket)
    finally:
        watcher.cancel()
    context.record.at = "proxy"


async def _watch(request: web.Request) -> None:
    """Abort the request if its client disconnects.

    aiohttp stops reading from the socket while a body is not consumed, and then does not see that
    the connection is closed.
    """
    if (transport := request.transport) is None:  # the client has disconnected
        return
    peer = select.poll()
    peer.register(transport.get_extra_info("socket"), select.POLLRDHUP)
    while not peer.poll(0):  # noqa: ASYNC110 - the loop watches no socket twice
        await asyncio.sleep(LOOK_S)
    transport.abort()  # aiohttp then cancels the request


async def request_body(request: web.Request, visit: Visit) -> Body:
    """Return a request's body as the stages get it, and set the fields of its context.

    Raises:
        ProxyError: the request is rejected.
    """
    context = visit.context
    config, endpoint = context.config, context.endpoint
    raw = await read(request)
    watch(context, raw)
    content_type = request.headers.get("Content-Type", "")
    body, cuts, text_bytes = endpoint.read(raw, content_type, config.max_text_bytes)
    context.cuts, context.text_bytes = cuts, text_bytes
    body = endpoint.at_interval(body, config.stream_interval)
    context.model = body.get("model")
    if context.span is not None:
        context.span.record_request(endpoint.operation, context.model)
    if endpoint.salted and context.tenant is not ANONYMOUS:  # without keys, all clients share
        body = with_salt(body, config.scope_of(context.tenant))
    body = _for_engines(request.headers, context, body)
    if CONVERSATION in body:
        body, context.turn = _turn(context, body)
        if context.turn is not None:
            context.session = context.session or context.turn.key
    return body


async def read(request: web.Request) -> bytes | bytearray:
    """Return the body of an admitted request. Its bytes are counted as they arrive.

    Raises:
        RequestRefused: the body is encoded (415), too large (413) or too slow (408).
        TryLater: there is no room for the body (`AdmittedRequest.grow`).
    """
    # A few compressed bytes may unpack into any number, and images are compressed already.
    encoding = request.headers.get(hdrs.CONTENT_ENCODING)
    if encoding is not None and encoding.lower() != "identity":
        raise RequestRefused(
            415, "the body must have no Content-Encoding", slug="unsupported_encoding"
        )
    visit = request[VISIT]
    limit = visit.context.config.worker_max_body_bytes
    if request.content.is_eof():  # the body arrived with the head
        body = request.content.read_nowait()
        _count(len(body), limit, visit.admitted)
        return body
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    await _ask_for(request)
    try:
        return await _collect(request, visit.context.config, visit.admitted)
    except TimeoutError:
        raise RequestRefused(408, "the body did not arrive in time", slug="body_timeout") from None


async def read_json(request: web.Request) -> bytes | bytearray:
    """Return the body of a request that must be JSON.

    Raises:
        RequestRefused: the `Content-Type` is not JSON (415).
        ProxyError: as `read` does.
    """
    check_json_type(request.headers.get("Content-Type", ""))
    return await read(request)


async def _collect(
    request: web.Request, config: ConfigFields, admitted: AdmittedRequest
) -> bytearray:
    started, limit = asyncio.get_running_loop().time(), config.worker_max_body_bytes
    latest = started + config.body_timeout_s
    content, length = request.content, request.content_length
    # Joining what has arrived costs a copy. Without a length, parts may be of one byte each.
    sized = length is not None
    parts = bytearray()  # a list of one-byte parts would need 40 times the memory
    async with asyncio.timeout_at(min(latest, started + GRACE_S)) as deadline:
        while chunk := (await content.readchunk())[0] if sized else await content.readany():
            parts += chunk
            # Twice the received bytes: a body is refused before its second half arrives, and a
            # client that sends nothing reserves nothing.
            size = len(parts) if length is None else min(length, 2 * len(parts))
            _count(size, limit, admitted)
            rate_s = len(parts) / config.body_min_rate_bytes
            deadline.reschedule(min(latest, started + GRACE_S + rate_s))
    return parts


def _count(size: int, limit: int, admitted: AdmittedRequest) -> None:
    if size > limit:
        raise _too_large(limit)
    admitted.grow(size)


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused(413, f"the body is larger than {limit} bytes", slug="body_too_large")


async def _ask_for(request: web.Request) -> None:
    """Send `100 Continue` to a client that waits for it, once the request has passed all checks."""
    expected = request.headers.get(hdrs.EXPECT, "").lower()
    if expected == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # it is not part of the response


def watch(context: RequestContext, raw: bytes | bytearray) -> None:
    """Identify a request by its body, in case that an instance dies of it."""
    context.watched = Watched(context.tenant.name, fingerprint(raw, SEED))


def _for_engines(client_headers: Headers, context: RequestContext, body: Body) -> Body:
    """Forward the client's headers for engines; return the body with the request's priority.

    Only a trusted tenant may set a priority and see an instance's load: a priority puts a request
    before those of other tenants, and the load shows their activity.
    """
    endpoint, trusted = context.endpoint, context.config.trusts_tenant(context.tenant)
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
