"""Cross-origin requests (CORS): which web pages may use the proxy from a browser.

The rules are those of vLLM's server for `--allowed-origins`, which uses starlette's
`CORSMiddleware`.
"""

from collections.abc import Callable, Collection, Container
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from epd.config import ProxyConfig
from epd.edge.access import Access
from epd.errors import RequestRefused
from epd.server.app_keys import VISIT
from epd.server.error_responses import error_response
from epd.server.middlewares import answer_unknown
from epd.server.responses import response_headers

CLIENTS = frozenset({Access.OPEN, Access.TENANT})
"""Classes of access of the routes that web pages of other origins may use."""

OWN_PAGE = "/ui"
"""Prefix of the paths of the proxy's own page. `/ui/{file}` also matches `/ui/state`, which is a
route of the operator."""

ANY = "*"
"""Wildcard for all origins."""

ALLOWED = "Access-Control-Allow-Origin"
"""Header without which a browser does not let a page use the proxy."""

PREFLIGHT = {
    "Vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, "
    "Access-Control-Request-Private-Network",
    "Access-Control-Allow-Methods": "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
    "Access-Control-Max-Age": "600",
}
"""Headers of the answer to each preflight; a browser may keep it for 600 s."""

Route = tuple[Access, web.RouteDef]


def allow_origins(
    app: web.Application,
    config: ProxyConfig,
    routes: Collection[Route],
    options: Callable[[str, Handler], web.RouteDef],
) -> list[Route]:
    """Let web pages of the configured origins use the clients' routes; return preflight routes.

    A path with at least one route for operators is excluded with all its routes. `options` declares
    a route for the method OPTIONS.
    """
    if not config.allowed_origins:
        return []
    operators = {route.path for access, route in routes if access not in CLIENTS}
    shared = [
        route
        for _, route in routes
        if route.path not in operators and not route.path.startswith(OWN_PAGE)
    ]
    app.on_response_prepare.append(
        partial(_add_headers, config.allowed_origins, {route.handler for route in shared})
    )
    # One handler for all: a route's class of access is looked up by its handler.
    handler = partial(_preflight, config.allowed_origins)
    return [
        (Access.OPEN, options(path, handler))
        for path in dict.fromkeys(route.path for route in shared)
    ]


async def _add_headers(
    origins: Container[str],
    handlers: Container[object],
    request: web.Request,
    response: web.StreamResponse,
) -> None:
    """Add the headers that tell the browser whether the page may read the response."""
    if request.match_info.handler in handlers:
        response.headers.update(_origin_headers(origins, request.headers.get("Origin")))


def _origin_headers(origins: Container[str], origin: str | None) -> dict[str, str]:
    """Return the headers for the request's `Origin`. `Vary` makes caches separate the origins."""
    headers = {"Vary": "Origin"}
    if origin is not None and ANY in origins:
        headers[ALLOWED] = ANY
    elif origin and origin in origins:
        headers[ALLOWED] = origin
    return headers


async def _preflight(origins: Container[str], request: web.Request) -> web.Response:
    """Answer a preflight (`OPTIONS`). A browser sends no key with it."""
    origin = request.headers.get("Origin")
    if origin is None or "Access-Control-Request-Method" not in request.headers:
        return await answer_unknown(request)
    headers = _origin_headers(origins, origin) | PREFLIGHT
    names = request.headers.get("Access-Control-Request-Headers", "")
    if names and names.isascii() and names.isprintable():
        headers["Access-Control-Allow-Headers"] = names
    if ALLOWED in headers:
        return web.Response(text="OK", headers=response_headers(request[VISIT].record) | headers)
    error = RequestRefused(400, "Disallowed CORS origin", slug="cors_refused")
    answer = error_response(request, error, request[VISIT])
    answer.headers.update(headers)
    return answer
