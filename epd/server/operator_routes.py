"""Operator routes: health, readiness, metrics, `/instances`, `/policies`, profiling and `/ui`.

The docstrings of the handlers are published in `/openapi.json` (see `openapi.py`).
"""

from importlib.resources import files
from types import MappingProxyType
from typing import Literal, TypedDict
from urllib.parse import urlsplit

from aiohttp import web

from epd.api.body import JSON, check_json_type, parse_json
from epd.config import ProxyConfig
from epd.edge.drain import DRAIN
from epd.errors import BadRequest, NoInstance, Overloaded, RequestRefused
from epd.observe.metrics import MetricsObserver
from epd.routing.instances import ANSWERING
from epd.routing.table import InstanceTable
from epd.server.admin import ADMIN, HealthPage, ProfilePage
from epd.server.app_keys import VISIT
from epd.server.instances_api import InstancesPage, Registered, Roster, Unregistered
from epd.server.intake import may_administer, read, read_json
from epd.server.policies_api import Policies, PoliciesPage
from epd.server.responses import JsonResponse, as_json, check_key, own_headers
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


ASSETS = MappingProxyType(
    {file.name: file.read_bytes() for file in files("epd.ui").joinpath("static").iterdir()}
)
"""Static files of the page, by name."""


def store_kind(config: ProxyConfig) -> str | None:
    """Return the URL scheme of the encoder store: the rest may hold a password."""
    return None if config.ec_store is None else urlsplit(config.ec_store).scheme


async def page(request: web.Request) -> web.Response:
    """Return the operator's page, which holds no data of the fleet.

    Returns:
        200: the page.
    """
    return _file("index.html", request)


async def root(request: web.Request) -> web.Response:
    """Redirect to the operator's page.

    Returns:
        302: to `/ui`.
    """
    visit = request[VISIT]
    headers = {"Location": f"{visit.config.root_path or ''}/ui", **own_headers(visit.record)}
    return web.Response(status=302, headers=headers)


async def page_file(request: web.Request) -> web.Response:
    """Return a static file of the operator's page.

    Returns:
        200: a style sheet, a JavaScript module or an icon.

    Raises:
        RequestRefused: 404, the page has no such file.
    """
    return _file(request.match_info["file"], request)


def _file(name: str, request: web.Request) -> web.Response:
    if name not in ASSETS:
        raise RequestRefused(404, "the page has no such file", slug="unknown_route")
    return web.Response(
        body=ASSETS[name],
        content_type=TYPES[name.rpartition(".")[2]],
        charset="utf-8",
        headers=HEADERS | own_headers(request[VISIT].record),
    )


async def page_state(request: web.Request) -> web.Response:
    """Return the content of the operator's page.

    It has the instances, latencies, saved work, and latest requests and errors of all workers.

    Returns:
        200: the state, at most 1.5 s old.
    """
    return web.Response(
        body=await request.app[BOARD].document(),
        content_type="application/json",
        headers={"Cache-Control": "no-store"} | own_headers(request[VISIT].record),
    )


METRICS = web.AppKey("metrics", MetricsObserver)
TABLE = web.AppKey("table", InstanceTable)
ROSTER = web.AppKey("roster", Roster)
POLICIES = web.AppKey("policies", Policies)


async def health(request: web.Request) -> JsonResponse[HealthPage]:
    """Check the health of every instance.

    Returns:
        200: every stage with instances has at least one that answers.
        503: a stage has no instance that answers.
    """
    status, body = await request.app[ADMIN].health()
    return as_json(body, request[VISIT].record, status)


class Versions(TypedDict):
    """Versions of the proxy and of its instances."""

    version: str
    """Version of the proxy."""
    instances: dict[str, str | None]
    """Version of vLLM of each instance, by URL; null if it reports none."""


async def version(request: web.Request) -> JsonResponse[Versions]:
    """Return the proxy's version, and the vLLM version of each instance.

    Returns:
        200: the versions.
    """
    await check_key(request)
    instances = await request.app[ADMIN].versions()
    return as_json(Versions(version=__version__, instances=instances), request[VISIT].record)


class Readiness(TypedDict):
    """Statement that the proxy serves requests."""

    status: Literal["ready"]


async def ready(request: web.Request) -> JsonResponse[Readiness]:
    """Report whether this proxy can serve requests: a decode instance has answered.

    The proxy sends no request to an instance for it, so frequent probes are cheap.

    Returns:
        200: the proxy serves requests.

    Raises:
        Overloaded: the proxy is about to stop.
        NoInstance: no decode instance is available.
    """
    if request.app[DRAIN].began:
        raise Overloaded("the proxy is about to stop", slug="shutting_down")
    table, policies = request.app[TABLE], request.app[POLICIES]
    if not (table.serves_answered(*ANSWERING) or policies.decodes_elsewhere):
        raise NoInstance("no decode instance can be reached", slug="no_decode")
    return as_json(Readiness(status="ready"), request[VISIT].record)


async def ping(request: web.Request) -> JsonResponse[Readiness]:
    """Report the same as `/ready`, under SageMaker's name.

    Returns:
        200: the proxy serves requests.

    Raises:
        Overloaded: the proxy is about to stop.
        NoInstance: no decode instance is available.
    """
    return await ready(request)


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics of all workers for Prometheus.

    Returns:
        200: a text format of Prometheus.
    """
    accept = request.headers.get("Accept", "")
    page, content_type = await request.app[METRICS].page_of_all(accept)
    headers = own_headers(request[VISIT].record) | {"Content-Type": content_type}
    return web.Response(body=page, headers=headers)


async def list_instances(request: web.Request) -> JsonResponse[InstancesPage]:
    """List the instances.

    With the admin key (without a configured one, where the operator's other routes answer without
    it) the response has details of each instance.

    Returns:
        200: instances that get requests and ejected instances, by role.
    """
    shown = request.app[ROSTER].instances_page(detailed=may_administer(request))
    return as_json(shown, request[VISIT].record)


async def register_instance(request: web.Request) -> JsonResponse[Registered]:
    """Register an instance.

    Needs `--dynamic-registration`.

    Returns:
        200: whether the instance is new.

    Raises:
        BadRequest: the instance uses another encoder-cache transfer than the proxy.
        RequestRefused: 403, its host, or that of one of its addresses, may not be registered.
        RequestRefused: 404, the proxy runs without `--dynamic-registration`.
        RequestRefused: 409, it conflicts with a registered instance.
        RequestRefused: 422, the body does not describe an instance, or the KV transfer does not
            support it.
        Overloaded: the store of registrations cannot be used.
    """
    body = await read_json(request)
    return as_json(await request.app[ROSTER].register(bytes(body)), request[VISIT].record)


async def unregister_instance(request: web.Request) -> JsonResponse[Unregistered]:
    """Remove the registration of an instance.

    Needs `--dynamic-registration`. Running requests are not interrupted.

    Returns:
        200: whether there was a registration.

    Raises:
        RequestRefused: 404, the proxy runs without `--dynamic-registration`.
        RequestRefused: 422, the URL is invalid.
        Overloaded: the store of registrations cannot be used.
    """
    url = request.query.get("url")
    return as_json(await request.app[ROSTER].unregister(url), request[VISIT].record)


async def list_policies(request: web.Request) -> JsonResponse[PoliciesPage]:
    """List the coordination policies in force.

    They are in order of priority: the first policy that applies to a request decides which stages
    run on which instances.

    Returns:
        200: policies in force.
    """
    return as_json(request.app[POLICIES].policies_page(), request[VISIT].record)


async def set_policies(request: web.Request) -> JsonResponse[PoliciesPage]:
    """Replace all policies in force.

    They apply to all workers, until the proxy ends.

    Returns:
        200: policies in force.

    Raises:
        BadRequest: the body is not JSON.
        RequestRefused: 422, the policies are invalid; nothing was changed.
        Overloaded: another process is changing the policies.
    """
    body = await read_json(request)
    return as_json(request.app[POLICIES].replace(bytes(body)), request[VISIT].record)


async def add_policy(request: web.Request) -> JsonResponse[PoliciesPage]:
    """Add a policy, or change the options of one.

    Without a priority, a new policy becomes the first one, and a policy with other options keeps
    its place.

    Returns:
        200: policies in force.

    Raises:
        BadRequest: the body is not JSON.
        RequestRefused: 422, the policy is invalid; nothing was changed.
        Overloaded: another process is changing the policies.
    """
    body = await read_json(request)
    return as_json(request.app[POLICIES].add(bytes(body)), request[VISIT].record)


async def remove_policy(request: web.Request) -> JsonResponse[PoliciesPage]:
    """Remove a policy, or return to the configured policies.

    Without a name, the configured policies apply again.

    Returns:
        200: policies in force.

    Raises:
        BadRequest: the query is neither `name=…` nor empty.
        RequestRefused: 404, the policy is not in force.
        RequestRefused: 422, the policy is the only one; nothing was changed.
        Overloaded: another process is changing the policies.
    """
    match list(request.query.items()):
        case []:
            name = None
        case [("name", name)]:
            pass
        case _:  # a mistyped query must not remove all policies
            raise BadRequest("the query must be name=… or empty", slug="invalid_policy")
    return as_json(request.app[POLICIES].remove(name), request[VISIT].record)


async def start_profile(request: web.Request) -> JsonResponse[ProfilePage]:
    """Start profiling on every instance.

    The body, if any, is forwarded to the instances.

    Returns:
        200: status or error of each instance, by stage and URL.

    Raises:
        RequestRefused: 503, no instance has a profiler.
    """
    return await _profile("start", request)


async def stop_profile(request: web.Request) -> JsonResponse[ProfilePage]:
    """Stop profiling on every instance.

    The body, if any, is forwarded to the instances.

    Returns:
        200: status or error of each instance, by stage and URL.

    Raises:
        RequestRefused: 503, no instance has a profiler.
    """
    return await _profile("stop", request)


async def _profile(command: str, request: web.Request) -> JsonResponse[ProfilePage]:
    body = await read(request)
    if body:
        check_json_type(request.headers.get("Content-Type", ""))
        parse_json(body)
    visit = request[VISIT]
    headers = {**visit.headers, "Content-Type": JSON, "X-Request-Id": visit.id}
    return as_json(await request.app[ADMIN].profile(command, headers, bytes(body)), visit.record)
