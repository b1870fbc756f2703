"""Who is let in: whose key opens what, and when there is a place."""

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
"""Between two looks at whether a client that waits is still there."""

OTHER_HEADER = "X-API-Key"
"""Where Anthropic's clients and operators present their keys."""

TIMEOUT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
"""A client's x-request-timeout, in seconds."""


async def served(request: web.Request, handler: Handler, visit: Visit) -> web.StreamResponse:
    """Let a request in that may come, when there is a place for it, for as long as it has.

    Health and metrics are asked for when it matters most: they need no place.
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
    """Wait for the request's turn."""
    with context.timed("queue", "proxy"):
        async with _watched(request):
            await admission.turn(ticket)
    context.record.at = "proxy"


def _authenticate(request: web.Request, visit: Visit) -> None:
    """Let nobody further than a route's class of access says."""
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
    """Return what a client is told whose key is not accepted.

    Args:
        header: where its key is looked for.
        headers: the request's.
    """
    form = "Bearer <key>" if header == "Authorization" else "<key>"
    wanted = f"a valid API key is needed: {header}: {form}"
    if header == "Authorization" and OTHER_HEADER in headers:
        return f"{wanted} ({OTHER_HEADER} is not accepted on this route)"
    return wanted


def _check_admin(request: web.Request) -> None:
    peer = request.get_extra_info("peername")
    address = peer[0] if isinstance(peer, tuple) else None
    check_admin(request[VISIT].context.config.admin_api_key, request.headers, address)


async def read(request: web.Request) -> bytes | bytearray:
    """The body of a request that is served; it is counted as it comes.

    Raises:
        ProxyError: see `epd.edge.body.read_body`.
    """
    visit = request[VISIT]
    return await read_body(request, visit.context.config, visit.admitted.grow)


async def read_json(request: web.Request) -> bytes | bytearray:
    """The body of a request that must be JSON.

    Raises:
        RequestRefused: 415, its client does not call it JSON.
        ProxyError: as `read` does.
    """
    check_json_type(request.headers.get("Content-Type", ""))
    return await read(request)


def may_administer(request: web.Request) -> bool:
    """Whether it could use the operator's routes, whichever it uses."""
    try:
        _check_admin(request)
    except (Unauthorized, RequestRefused):
        return False
    return True


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
