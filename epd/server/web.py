"""Creation of the aiohttp application, and the table of its routes."""

import time
from collections.abc import Sequence
from functools import partial

from aiohttp import web

from epd.background import Background
from epd.bodies.endpoints import ENDPOINTS
from epd.config import ProxyConfig
from epd.config.live import LiveConfig
from epd.edge.access import Access
from epd.edge.admission import Admission
from epd.edge.drain import DRAIN, Drain
from epd.edge.limits import limits_of
from epd.edge.protocol import DIRECT
from epd.events import Observer
from epd.models import ModelNames
from epd.observe.logs import LogObserver, hide_locals
from epd.observe.metrics import MetricsObserver
from epd.server import clients, operators, ui
from epd.server.answers import UnknownRoute
from epd.server.assembly import LOG, METRICS, POLICIES, RECENT, connections
from epd.server.browsers import allow_origins
from epd.server.files import read_keys
from epd.server.middlewares import direct, observe
from epd.server.policies import Policies
from epd.server.reload import RELOAD, Reload
from epd.server.slots import (
    ACCESS,
    ADMISSION,
    BACKGROUND,
    CONFIG,
    KEYS,
    MODELS,
    OBSERVERS,
    UNKNOWN,
)
from epd.server.visit import VISIT
from epd.ui.recent import Recent


def create_app(config: ProxyConfig, observers: Sequence[Observer] | None = None) -> web.Application:
    """Return the proxy as an aiohttp application, to run or to mount in another application.

    Run it with `handler_cancellation=True` (`web.run_app`, `web.AppRunner`): the upstream requests
    of a client that disconnects are then cancelled. `epd.edge.protocol.Runner` sets it, and also
    guards against slow and malformed HTTP.

    Args:
        config: configuration, as `epd serve` makes it of its flags.
        observers: receivers of all events, in addition to the observer for `/metrics`; by
            default one that logs them.

    Raises:
        KeysInvalid: the keys file cannot be used.
    """
    return application(LiveConfig(config), observers)


def application(live: LiveConfig, observers: Sequence[Observer] | None = None) -> web.Application:
    """Return the application as `create_app` does, with a configuration that may be reloaded.

    Raises:
        KeysInvalid: the keys file cannot be used.
    """
    hide_locals()
    app, config = web.Application(middlewares=(observe,)), live.current
    app[CONFIG] = live
    app[ADMISSION] = Admission(limits_of(config), time.monotonic)
    keys = read_keys(config)
    if keys is not None:
        app[KEYS] = keys
    routes = (*ROUTES, *allow_origins(app, config, ROUTES, _options))
    app[ACCESS] = dict[object, Access]((route.handler, access) for access, route in routes)
    app.add_routes([route for _, route in routes])
    app.add_routes([_any("/{anything:.*}", nothing, name=UNKNOWN)])
    app[MODELS] = ModelNames()
    app[METRICS] = MetricsObserver(app[ADMISSION])
    app[BACKGROUND] = Background(app[METRICS].background_failed)
    app[RECENT] = Recent()
    app[POLICIES] = Policies(live)
    app[RELOAD] = Reload(app[METRICS].reloaded)
    app[DRAIN] = Drain()
    app[DIRECT] = direct(app, clients.answer)
    app[LOG] = LogObserver(config.kv_lease_s, tenants=config.log_tenants)
    own: tuple[Observer, ...] = (app[METRICS], app[RECENT])
    app[OBSERVERS] = (*own, *((app[LOG],) if observers is None else observers))
    app.cleanup_ctx.append(connections)
    return app


async def _not_yet(_: web.Request) -> None:
    """Send no `100 Continue` before the checks of the request: `read_body` sends it later."""


async def nothing(request: web.Request) -> web.StreamResponse:
    """Answer a request for an unknown path, or with a method that its path does not have.

    aiohttp's own handler would send `100 Continue` first.

    Raises:
        UnknownRoute: the path has no route.
        HTTPMethodNotAllowed: the path has routes for other methods.
    """
    methods = set[str]()
    for route in request.app.router.resources():
        if route.name != UNKNOWN and (own := (await route.resolve(request))[1]):
            methods |= own
            request[VISIT].context.record.path = route.canonical
    if not methods:
        raise UnknownRoute(request.rel_url.raw_path)
    raise web.HTTPMethodNotAllowed(request.method, methods)


_get, _put, _post, _delete, _options, _any = (
    partial(declare, expect_handler=_not_yet)
    for declare in (web.get, web.put, web.post, web.delete, web.options, partial(web.route, "*"))
)
ROUTES = (
    (Access.OPEN, _get("/health", operators.health)),  # a load balancer has no key
    (Access.OPEN, _get("/ready", operators.ready)),
    (Access.OPEN, _get("/ping", operators.ready)),  # SageMaker's name for it
    (Access.OPEN, _post("/ping", operators.ready)),
    (Access.OPEN, _get("/openapi.json", operators.openapi)),  # it holds no data of this fleet
    (Access.OPEN, _get("/", ui.root)),
    (Access.OPEN, _get("/ui", ui.page)),  # nor do these
    (Access.OPEN, _get("/ui/{file}", ui.asset)),
    (Access.OPEN, _get("/instances", operators.instances)),  # without a key as /health does
    (Access.REGISTRAR, _post("/instances", operators.register)),
    (Access.REGISTRAR, _delete("/instances", operators.unregister)),
    *((Access.TENANT, _post(path, clients.answer)) for path in ENDPOINTS),
    (Access.TENANT, _post("/v1/media", clients.push_media)),
    (Access.TENANT, _delete("/v1/media/{uuid}", clients.forget_media)),
    (Access.TENANT, _get("/v1/responses/{id}", clients.kept_response)),
    (Access.TENANT, _post("/v1/responses/{id}/cancel", clients.kept_response)),
    (Access.TENANT, _get("/v1/models", clients.models)),
    (Access.TENANT, _get("/tokenizer_info", clients.tokenizer_info)),
    (Access.TENANT, _get("/version", operators.version)),
    (Access.ADMIN, _get("/metrics", operators.metrics)),
    (Access.ADMIN, _get("/ui/state", ui.state)),
    (Access.ADMIN, _get("/policies", operators.policies)),
    (Access.ADMIN, _put("/policies", operators.set_policies)),
    (Access.ADMIN, _post("/policies", operators.add_policy)),
    (Access.ADMIN, _delete("/policies", operators.remove_policy)),
    (Access.ADMIN, _post("/start_profile", partial(operators.profile, "start"))),
    (Access.ADMIN, _post("/stop_profile", partial(operators.profile, "stop"))),
)
"""All routes, with their classes of access. No other path is forwarded to an instance: many of
vLLM's routes need no key, such as those that change its weights or put it to sleep."""
