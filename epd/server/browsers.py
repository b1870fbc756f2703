"""Cross-origin responses (CORS) to web pages of the origins that the configuration allows."""

from collections.abc import Callable, Collection, Container
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from epd.config import ProxyConfig
from epd.edge.access import Access
from epd.edge.cors import CrossOrigin, Preflight
from epd.errors import RequestRefused
from epd.server.answers import error_response, own_headers
from epd.server.visit import VISIT

CLIENTS = frozenset({Access.OPEN, Access.TENANT})
"""Classes of access of the routes that web pages of other origins may use."""

OWN_PAGE = "/ui"
"""Prefix of the paths of the proxy's own page. `/ui/{file}` also matches `/ui/state`, which is a
route of the operator."""

Route = tuple[Access, web.RouteDef]


def allow_origins(
    app: web.Application,
    config: ProxyConfig,
    routes: Collection[Route],
    options: Callable[[str, Handler], web.RouteDef],
) -> list[Route]:
    """Allow web pages of the configured origins to use the clients' routes.

    A path with at least one route for operators is excluded with all its routes.

    Args:
        app: application that gets the CORS headers in its responses.
        config: allowed origins, methods and headers.
        routes: all routes.
        options: function that declares a route for the method OPTIONS.

    Returns:
        Routes that answer preflights.
    """
    if not config.allowed_origins:
        return []
    rules = CrossOrigin(
        config.allowed_origins,
        config.allowed_methods,
        config.allowed_headers,
        credentials=config.allow_credentials,
    )
    operators = {route.path for access, route in routes if access not in CLIENTS}
    shared = [
        route
        for _, route in routes
        if route.path not in operators and not route.path.startswith(OWN_PAGE)
    ]
    app.on_response_prepare.append(partial(_mark, rules, {route.handler for route in shared}))
    # One handler for all: a route's class of access is looked up by its handler.
    handler = partial(_preflight, rules)
    return [
        (Access.OPEN, options(path, handler))
        for path in dict.fromkeys(route.path for route in shared)
    ]


async def _mark(
    rules: CrossOrigin,
    handlers: Container[object],
    request: web.Request,
    response: web.StreamResponse,
) -> None:
    """Add the CORS headers that tell the browser whether the page may read the response."""
    if request.match_info.handler in handlers:
        response.headers.update(rules.answer(request.headers.get("Origin")))


async def _preflight(rules: CrossOrigin, request: web.Request) -> web.Response:
    """Answer a preflight (`OPTIONS`). A browser sends no key with it."""
    match rules.preflight(request.headers):
        case None:
            raise web.HTTPMethodNotAllowed(request.method, await _methods(request))
        case Preflight((), headers):
            own = {**own_headers(request[VISIT].context), **headers}
            return web.Response(text="OK", headers=own)
        case Preflight(refused, headers):
            message = f"Disallowed CORS {', '.join(refused)}"
            error = RequestRefused(400, message, slug="cors_refused")
            answer = error_response(request, error, request[VISIT].context)
            answer.headers.update(headers)
            return answer


async def _methods(request: web.Request) -> set[str]:
    """Return the methods of a path's other routes."""
    found = [(await it.resolve(request))[1] for it in request.app.router.resources()]
    return set().union(*found) - {"OPTIONS", "*"}
