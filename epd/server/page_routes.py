"""The operator's page: its files, and its content."""

from importlib.resources import files
from types import MappingProxyType

from aiohttp import web

from epd.errors import RequestRefused
from epd.server.app_keys import VISIT
from epd.server.responses import JsonResponse, response_headers
from epd.ui.dashboard import Board
from epd.ui.state import UiState

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


ASSETS = MappingProxyType(
    {file.name: file.read_bytes() for file in files("epd.ui").joinpath("static").iterdir()}
)
"""Static files of the page, by name."""


async def page(request: web.Request) -> web.Response:
    """Return the operator's page, which holds no data of the fleet."""
    return _file("index.html", request)


async def root(request: web.Request) -> web.Response:
    """Redirect to the operator's page."""
    visit = request[VISIT]
    headers = {"Location": f"{visit.config.root_path or ''}/ui", **response_headers(visit.record)}
    return web.Response(status=302, headers=headers)


async def page_file(request: web.Request) -> web.Response:
    """Return a static file of the operator's page."""
    return _file(request.match_info["file"], request)


def _file(name: str, request: web.Request) -> web.Response:
    if name not in ASSETS:
        raise RequestRefused(404, "the page has no such file", slug="unknown_route")
    return web.Response(
        body=ASSETS[name],
        content_type=TYPES[name.rpartition(".")[2]],
        charset="utf-8",
        headers=HEADERS | response_headers(request[VISIT].record),
    )


async def page_state(request: web.Request) -> JsonResponse[UiState]:
    """Return the content of the operator's page.

    It has the instances, latencies, saved work, and latest requests and errors of all workers.
    """
    return JsonResponse(
        body=await request.app[BOARD].document(),
        content_type="application/json",
        headers={"Cache-Control": "no-store"} | response_headers(request[VISIT].record),
    )
