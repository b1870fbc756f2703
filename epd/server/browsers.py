"""Answers to web pages of other origins (CORS), where the configuration allows any."""

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
"""Classes of access of the routes that pages may use."""

OWN_PAGE = "/ui"
"""How the paths of the proxy's own page begin. `/ui/{file}` is the path of its state as well, which
is the operator's."""

Route = tuple[Access, web.RouteDef]


def allow_origins(
    app: web.Application,
    config: ProxyConfig,
    routes: Collection[Route],
    options: Callable[[str, Handler], web.RouteDef],
) -> list[Route]:
    """Have pages of the configured origins use the clients' routes.

    A path that has a route of the operator's is left out, whatever else it has.

    Args:
        app: the application, whose answers get headers from now on.
        config: which pages may do what.
        routes: all routes.
        options: declares a route for the method OPTIONS.

    Returns:
        The routes that answer preflights.
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
    """Say on an answer whether the page that asked may read it."""
    if request.match_info.handler in handlers:
        response.headers.update(rules.answer(request.headers.get("Origin")))


async def _preflight(rules: CrossOrigin, request: web.Request) -> web.Response:
    """`OPTIONS`: what the page may send. A browser has no key here."""
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
    """Methods of a path's other routes."""
    found = [(await it.resolve(request))[1] for it in request.app.router.resources()]
    return set().union(*found) - {"OPTIONS", "*"}
