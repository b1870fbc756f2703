"""Operator's page `/ui`: static files without data of the fleet, and the state that they load."""

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

from epd.config import ProxyConfig
from epd.server.answers import own_headers
from epd.server.visit import VISIT
from epd.ui.board import Board

BOARD = web.AppKey("board", Board)

TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
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
    """One static file of the page, with its media type."""

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
    """Return the URL scheme of the encoder-cache store: the rest may hold a password."""
    return None if config.ec_store is None else urlsplit(config.ec_store).scheme


async def page(request: web.Request) -> web.Response:
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
