"""Access of a request: check of its key, and its wait for a place."""

import asyncio
import math
import re
import select
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler

from epd.bodies.parsing import check_json_type
from epd.config import ProxyConfig
from epd.edge.access import Access, check_admin, check_registrar, client_key
from epd.edge.admission import Admission
from epd.edge.body import read_body, too_large
from epd.edge.door import Ticket
from epd.edge.drain import DRAIN
from epd.errors import RequestRefused, Unauthorized
from epd.media.held import max_body_bytes
from epd.request.context import RequestContext
from epd.server.slots import ADMISSION, KEYS
from epd.server.visit import VISIT, Visit

LOOK_S = 0.1
"""Seconds between two checks whether the client of a queued request is still connected."""

OTHER_HEADER = "X-API-Key"
"""Header in which Anthropic's clients and operators send their keys."""

TIMEOUT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
"""Form of a client's `x-request-timeout`, in seconds."""


async def served(request: web.Request, handler: Handler, visit: Visit) -> web.StreamResponse:
    """Authenticate a request, wait for a place if it needs one, and answer it before its deadline.

    Only `POST` requests to the API need a place: health and metrics must answer under overload.
    """
    app, context, config = visit.app, visit.context, visit.context.config
    costly = visit.api and request.method == "POST"
    until_s = context.record.started_s + _limit_s(request, config) if costly else math.inf
    with app[DRAIN].bounded(until_s):
        _authenticate(request, visit)
        admission = app[ADMISSION]
        with admission.request(context.tenant) as admitted:
            context.held = visit.admitted = admitted
            if visit.api:
                admission.keep_pace(context.tenant)
            if costly:
                size, limit = request.content_length or 0, max_body_bytes(config)
                if size > limit:
                    raise too_large(limit)
                ticket = admitted.arrive()
                if ticket.where == "queue":
                    await _queued(request, admission, ticket, context)
                admitted.grow(size)
            return await handler(request)


async def _queued(
    request: web.Request, admission: Admission, ticket: Ticket, context: RequestContext
) -> None:
    with context.timed("queue", "proxy"):
        async with _watched(request):
            await admission.turn(ticket)
    context.record.at = "proxy"


def _authenticate(request: web.Request, visit: Visit) -> None:
    """Raise an error if the request's key does not open a route of this class of access."""
    keys = visit.app.get(KEYS)
    if visit.access is Access.ADMIN:
        _check_admin(request)
    elif visit.access is Access.REGISTRAR:
        check_registrar(visit.context.config.admin_api_key, request.headers)
    elif visit.access is Access.TENANT and keys is not None:
        header = visit.context.endpoint.key_header
        tenant = keys.tenant_of(client_key(request.headers, header))
        if tenant is None:
            raise Unauthorized(_wanted(header, visit.context.client_headers))
        visit.context.tenant = tenant
        visit.context.record.tenant = tenant.name


def _wanted(header: str, headers: Mapping[str, str]) -> str:
    """Return the error message for a client with an invalid or missing key.

    Args:
        header: header of this route that carries the key.
        headers: headers of the request.
    """
    form = "Bearer <key>" if header == "Authorization" else "<key>"
    wanted = f"a valid API key is required: {header}: {form}"
    if header == "Authorization" and OTHER_HEADER in headers:
        return f"{wanted} ({OTHER_HEADER} is not accepted on this route)"
    return wanted


def _check_admin(request: web.Request) -> None:
    peer = request.get_extra_info("peername")
    address = peer[0] if isinstance(peer, tuple) else None
    check_admin(request[VISIT].context.config.admin_api_key, request.headers, address)


async def read(request: web.Request) -> bytes | bytearray:
    """Return the body of an admitted request. Its bytes are counted as they arrive.

    Raises:
        ProxyError: see `epd.edge.body.read_body`.
    """
    visit = request[VISIT]
    return await read_body(request, visit.context.config, visit.admitted.grow)


async def read_json(request: web.Request) -> bytes | bytearray:
    """Return the body of a request that must be JSON.

    Raises:
        RequestRefused: the `Content-Type` is not JSON (415).
        ProxyError: as `read` does.
    """
    check_json_type(request.headers.get("Content-Type", ""))
    return await read(request)


def may_administer(request: web.Request) -> bool:
    """Return whether the request's key and address open the operator's routes."""
    try:
        _check_admin(request)
    except (Unauthorized, RequestRefused):
        return False
    return True


def _limit_s(request: web.Request, config: ProxyConfig) -> float:
    """Return how long the whole request may take, in seconds, its wait in the queue included."""
    asked = request.headers.get("x-request-timeout")
    if asked is not None and TIMEOUT.fullmatch(asked):
        return min(config.request_timeout_s, float(asked))
    return config.request_timeout_s


@asynccontextmanager
async def _watched(request: web.Request) -> AsyncIterator[None]:
    """Detect that the client disconnects while the proxy does not read its body.

    aiohttp stops reading from the socket while a body is not consumed, and then does not see that
    the connection is closed.
    """
    watcher = asyncio.create_task(_watch(request))
    try:
        yield
    finally:
        watcher.cancel()


async def _watch(request: web.Request) -> None:
    if (transport := request.transport) is None:  # the client has disconnected
        return
    peer = select.poll()
    peer.register(transport.get_extra_info("socket"), select.POLLRDHUP)
    while not peer.poll(0):  # noqa: ASYNC110 - the loop watches no socket twice
        await asyncio.sleep(LOOK_S)
    transport.abort()  # aiohttp then cancels the request
