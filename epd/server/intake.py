"""Intake of a request: the check of its key, its wait for a slot, and the reading of its body."""

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

from epd.api.body import Cuts, check_json_type
from epd.api.items import Body, at_most, check_mm_kwargs
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
from epd.edge.admission import Admission, AdmittedRequest
from epd.edge.drain import DRAIN, Bounded
from epd.edge.fair_queue import Ticket
from epd.encoder_cache.identity import conversation_key, with_salt
from epd.errors import RequestRefused, Unauthorized
from epd.request.recorder import Recorder
from epd.request.request import Request
from epd.routing.fatal import Watched, fingerprint
from epd.server.app_keys import ADMISSION, KEYS, VISIT, Visit
from epd.tenants import ANONYMOUS

GRACE_S = 5.0
"""Seconds before the minimum rate of a body applies: clients may create it while they send it."""

MIN_RATE_BYTES = 64 * 1024
"""Minimum rate of a body, in bytes per second; a slower one gets 408."""

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
    """Authenticate a request, wait for a slot if it needs one, and answer it before its deadline.

    Only `POST` requests to the API need a slot: health and metrics must answer under overload.
    """
    app, config = visit.app, visit.config
    costly = visit.api and request.method == "POST"
    until_s = visit.record.started_s + _limit_s(request, config) if costly else math.inf
    with Bounded(app[DRAIN], until_s):
        _authenticate(request, visit)
        admission = app[ADMISSION]
        with admission.request(visit.tenant) as admitted:
            visit.admitted = admitted
            if visit.api:
                admission.keep_pace(visit.tenant)
            if costly:
                size = request.content_length or 0
                admitted.check_size(size)
                ticket = admitted.enter_queue()
                if ticket.state == "queued":
                    await _queued(request, admission, ticket, visit.record)
                if size:
                    admitted.check_room(size)
            return await handler(request)


def _limit_s(request: web.Request, config: ConfigFields) -> float:
    """Return how long the whole request may take, in seconds, its wait in the queue included."""
    seconds = request.headers.get("x-request-timeout")
    if seconds is not None and TIMEOUT.fullmatch(seconds):
        return min(config.request_timeout_s, float(seconds))
    return config.request_timeout_s


def _authenticate(request: web.Request, visit: Visit) -> None:
    keys = visit.app.get(KEYS)
    if visit.access is Access.ADMIN:
        _check_admin(request)
    elif visit.access is Access.REGISTRAR:
        check_registrar(visit.config.admin_api_key, request.headers)
    elif visit.access is Access.TENANT and keys is not None:
        header = visit.endpoint.key_header
        tenant = keys.tenant_of(client_key(request.headers, header))
        if tenant is None:
            raise Unauthorized(_key_error(header, request.headers))
        visit.tenant = tenant
        visit.record.set_tenant(tenant.name)


def _key_error(header: str, headers: Mapping[str, str]) -> str:
    """Return the error message for an invalid or missing key, which this header must carry."""
    form = "Bearer <key>" if header == "Authorization" else "<key>"
    message = f"a valid API key is required: {header}: {form}"
    if header == "Authorization" and OTHER_HEADER in headers:
        return f"{message} ({OTHER_HEADER} is not accepted on this route)"
    return message


def _check_admin(request: web.Request) -> None:
    config = request[VISIT].config
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
    request: web.Request, admission: Admission, ticket: Ticket, record: Recorder
) -> None:
    watcher = asyncio.create_task(_watch(request))
    try:
        with record.time_stage("queue", "proxy"):
            await admission.wait_slot(ticket)
    finally:
        watcher.cancel()
    record.wait_for("proxy")


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


async def read_request(request: web.Request, visit: Visit) -> Request:
    """Return a request of the API, as the stages get it, after reading its body.

    Raises:
        ProxyError: the request is rejected.
    """
    config, endpoint, tenant = visit.config, visit.endpoint, visit.tenant
    raw = await read(request)
    content_type = request.headers.get("Content-Type", "")
    body, cuts, text_bytes = endpoint.read(raw, content_type, config.max_text_bytes)
    visit.record.begin_request(body.get("model"), endpoint.operation)
    if endpoint.salted and tenant is not ANONYMOUS:  # without keys, all clients share
        body = with_salt(body, config.scope_of(tenant))
    body, headers = _for_engines(request.headers, visit, body)
    turn = None
    if CONVERSATION in body:
        body, turn = _turn(visit, body)
    return make_request(request, raw, body, cuts, text_bytes, headers=headers, turn=turn)


def make_request(  # noqa: PLR0913 - the parts of a body
    request: web.Request,
    raw: bytes | bytearray,
    body: Body,
    cuts: Cuts,
    text_bytes: int = 0,
    *,
    headers: Mapping[str, str] | None = None,
    turn: Turn | None = None,
) -> Request:
    """Return the request with this body, which was read as `raw`.

    Raises:
        BadRequest: a media item is invalid, or there are too many.
    """
    visit = request[VISIT]
    config, endpoint = visit.config, visit.endpoint
    if not config.trust_request_mm_kwargs:
        check_mm_kwargs(body)
    items = at_most(endpoint.items(body), config.max_items)
    modalities = frozenset([item.modality for item in items])
    session = request.headers.get(config.session_header, "")
    return Request(
        visit.id,
        visit.headers if headers is None else headers,
        config,
        endpoint,
        body,
        items,
        text_bytes,
        visit.tenant,
        visit.clients_key,
        request.headers,
        session if session or turn is None else turn.key,
        turn,
        cuts,
        visit.admitted,
        visit.record,
        Watched(
            visit.tenant.name,
            fingerprint(raw, SEED),
            # What variants of a request share.
            kind=hash((endpoint.path, *body, modalities, text_bytes.bit_length())),
        ),
    )


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
    admitted = visit.admitted
    if request.content.is_eof():  # the body arrived with the head
        body = request.content.read_nowait()
        admitted.receive(len(body))
        return body
    admitted.check_size(request.content_length or 0)
    await _ask_for(request)
    try:
        return await _collect(request, visit.config.body_timeout_s, admitted)
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


async def _collect(request: web.Request, timeout_s: float, admitted: AdmittedRequest) -> bytearray:
    started = asyncio.get_running_loop().time()
    latest = started + timeout_s
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
            admitted.receive(size)
            rate_s = len(parts) / MIN_RATE_BYTES
            deadline.reschedule(min(latest, started + GRACE_S + rate_s))
    return parts


async def _ask_for(request: web.Request) -> None:
    """Send `100 Continue` to a client that waits for it, once the request has passed all checks."""
    expected = request.headers.get(hdrs.EXPECT, "").lower()
    if expected == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # it is not part of the response


def _for_engines(
    client_headers: Headers, visit: Visit, body: Body
) -> tuple[Body, Mapping[str, str]]:
    """Return the body with the request's priority, and the headers for the instances.

    Only a trusted tenant may set a priority and see an instance's load: a priority puts a request
    before those of other tenants, and the load shows their activity.
    """
    endpoint, trusted = visit.endpoint, visit.config.trusts_tenant(visit.tenant)
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
    return body, {**visit.headers, **headers} if headers else visit.headers


def _turn(visit: Visit, body: Body) -> tuple[Body, Turn | None]:
    """Return the body without its conversation's name, and its turn; None without a conversation.

    Raises:
        BadRequest: the name of the conversation is invalid.
    """
    name = conversation_id(body)
    body = {key: value for key, value in body.items() if key != CONVERSATION}
    if name is None or not visit.endpoint.generates:
        return body, None
    scope = visit.config.name_scope_of(visit.tenant)
    return body, Turn(conversation_key(scope, body, name))
