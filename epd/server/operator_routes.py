"""Operator routes: health, readiness, metrics, `/instances`, `/policies`, profiling and `/ui`.

The page `/ui` consists of static files without data of the fleet, and of the state that they load.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from epd.api.body import check_json_type, parse_json
from epd.config import ProxyConfig
from epd.edge.drain import DRAIN
from epd.errors import BadRequest, NoInstance, Overloaded
from epd.observe.metrics import MetricsObserver
from epd.routing.instances import ANSWERING
from epd.routing.table import InstanceTable
from epd.server.admin import ADMIN
from epd.server.app_keys import VISIT
from epd.server.instances_api import Roster
from epd.server.intake import may_administer, read, read_json
from epd.server.policies_api import Policies
from epd.server.responses import as_json, check_key, own_headers
from epd.ui.dashboard import Board
from epd.version import __version__

BOARD = web.AppKey("board", Board)

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""Media types of the page's files, by file extension."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: no content from other origins, no inline code, no embedding."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Asset(NamedTuple):
    """Static file of the page, with its media type."""

    body: bytes
    content_type: str


def _assets() -> Mapping[str, Asset]:
    return MappingProxyType(
        {
            one.name: Asset(one.read_bytes(), TYPES[one.name.rpartition(".")[2]])
            for one in files("epd.ui").joinpath("static").iterdir()
        }
    )


ASSETS = _assets()


def store_kind(config: ProxyConfig) -> str | None:
    """Return the URL scheme of the encoder store: the rest may hold a password."""
    return None if config.ec_store is None else urlsplit(config.ec_store).scheme


async def ui_page(request: web.Request) -> web.Response:
    """Answer `GET /ui` with the page, which holds no data of the fleet."""
    return _file("index.html", request)


async def root(request: web.Request) -> web.Response:
    """Answer `GET /` with a redirect to the page."""
    context = request[VISIT].context
    headers = {"Location": f"{context.config.root_path or ''}/ui", **own_headers(context)}
    return web.Response(status=302, headers=headers)


async def asset(request: web.Request) -> web.Response:
    """Answer `GET /ui/{file}` with a static file of the page."""
    return _file(request.match_info["file"], request)


def _file(name: str, request: web.Request) -> web.Response:
    if (found := ASSETS.get(name)) is None:
        raise web.HTTPNotFound
    return web.Response(
        body=found.body,
        content_type=found.content_type,
        charset="utf-8",
        headers=HEADERS | own_headers(request[VISIT].context),
    )


async def state(request: web.Request) -> web.Response:
    """Answer `GET /ui/state` with the data that the page shows."""
    return web.Response(
        body=await request.app[BOARD].document(),
        content_type="application/json",
        headers={"Cache-Control": "no-store"} | own_headers(request[VISIT].context),
    )


METRICS = web.AppKey("metrics", MetricsObserver)
TABLE = web.AppKey("table", InstanceTable)
ROSTER = web.AppKey("roster", Roster)
POLICIES = web.AppKey("policies", Policies)

OPENAPI = Path(__file__).with_name("openapi.json").read_bytes()


async def health(request: web.Request) -> web.Response:
    """Answer `GET /health` with the health of the proxy and of every instance."""
    status, body = await request.app[ADMIN].health()
    return as_json(body, request[VISIT].context, status)


async def version(request: web.Request) -> web.Response:
    """Answer `GET /version` with the proxy's version and the vLLM version of each instance."""
    await check_key(request)
    instances = await request.app[ADMIN].versions()
    return as_json({"version": __version__, "instances": instances}, request[VISIT].context)


async def openapi(request: web.Request) -> web.Response:
    """Answer `GET /openapi.json` with the description of all routes."""
    context = request[VISIT].context
    headers, prefix = own_headers(context), context.config.root_path
    body = OPENAPI if prefix is None else _document_below(prefix)
    return web.Response(body=body, content_type="application/json", headers=headers)


@cache
def _document_below(prefix: str) -> bytes:
    """Return the OpenAPI document for routes below a prefix."""
    return orjson.dumps({**orjson.loads(OPENAPI), "servers": [{"url": prefix}]})


async def ready(request: web.Request) -> web.Response:
    """Answer `/ready` and `/ping`: whether this proxy can serve requests.

    The proxy sends no request to an instance for it, so frequent probes are cheap.

    Raises:
        Overloaded: the proxy is draining.
        NoInstance: no decode instance is available.
    """
    if request.app[DRAIN].began:
        raise Overloaded("the proxy is about to stop", slug="shutting_down")
    decodes = (
        request.app[TABLE].serves_answered(*ANSWERING) or request.app[POLICIES].decodes_elsewhere
    )
    if not decodes:
        raise NoInstance("no decode instance can be reached", slug="no_decode")
    return as_json({"status": "ready"}, request[VISIT].context)


async def metrics(request: web.Request) -> web.Response:
    """Answer `GET /metrics` in a text format of Prometheus, for all workers."""
    accept = request.headers.get("Accept", "")
    page, content_type = await request.app[METRICS].page_of_all(accept)
    headers = own_headers(request[VISIT].context) | {"Content-Type": content_type}
    return web.Response(body=page, headers=headers)


async def instances(request: web.Request) -> web.Response:
    """Answer `GET /instances`. Only a client that may administer the proxy gets the details."""
    page = request.app[ROSTER].instances_page(detailed=may_administer(request))
    return as_json(page, request[VISIT].context)


async def register(request: web.Request) -> web.Response:
    """Answer `POST /instances`: register an instance."""
    body = await read_json(request)
    return as_json(await request.app[ROSTER].register(bytes(body)), request[VISIT].context)


async def unregister(request: web.Request) -> web.Response:
    """Answer `DELETE /instances?url=…`: remove the registration of an instance."""
    url = request.query.get("url")
    return as_json(await request.app[ROSTER].unregister(url), request[VISIT].context)


async def policies(request: web.Request) -> web.Response:
    """Answer `GET /policies` with the policies in force."""
    return as_json(request.app[POLICIES].policies_page(), request[VISIT].context)


async def set_policies(request: web.Request) -> web.Response:
    """Answer `PUT /policies`: replace all policies in force."""
    body = await read_json(request)
    return as_json(request.app[POLICIES].replace(bytes(body)), request[VISIT].context)


async def add_policy(request: web.Request) -> web.Response:
    """Answer `POST /policies`: add one policy, or change the options of one."""
    body = await read_json(request)
    return as_json(request.app[POLICIES].add(bytes(body)), request[VISIT].context)


async def remove_policy(request: web.Request) -> web.Response:
    """Answer `DELETE /policies?name=…`: remove one policy.

    Without a name, the configured policies apply again.
    """
    match list(request.query.items()):
        case []:
            name = None
        case [("name", name)]:
            pass
        case _:  # a mistyped query must not remove all policies
            raise BadRequest("the query must be name=… or empty", slug="invalid_policy")
    return as_json(request.app[POLICIES].remove(name), request[VISIT].context)


async def profile(command: str, request: web.Request) -> web.Response:
    """Answer `POST /start_profile` and `/stop_profile`: send the command to every instance."""
    body = await read(request)
    if body:
        check_json_type(request.headers.get("Content-Type", ""))
        parse_json(body)
    context = request[VISIT].context
    headers = context.headers_for(context.request_id)
    return as_json(await request.app[ADMIN].profile(command, headers, bytes(body)), context)
