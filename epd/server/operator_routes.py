"""Routes of the operator: health, readiness, version, metrics and profiling."""

from typing import Literal

from aiohttp import web
from typing_extensions import TypedDict

from epd.api.body import JSON, check_json_type, parse_json
from epd.config.shown import PublicSettings, public_settings
from epd.discovery.entries import rows
from epd.edge.drain import DRAIN
from epd.errors import NoInstance, Overloaded
from epd.observe.metrics import MetricsObserver
from epd.routing.instances import ANSWERING
from epd.routing.registry import InstanceSource
from epd.server.admin import ADMIN, ProfilePage
from epd.server.app_keys import TABLE, VISIT
from epd.server.health import HEALTH, HealthPage
from epd.server.instance_routes import REGISTRY
from epd.server.intake import read
from epd.server.key_judge import check_key
from epd.server.responses import JsonResponse, as_json, response_headers
from epd.version import __version__

METRICS = web.AppKey("metrics", MetricsObserver)


async def health(request: web.Request) -> JsonResponse[HealthPage]:
    """Check the health of every instance."""
    status, body = await request.app[HEALTH].page()
    return as_json(body, request[VISIT].record, status)


class Version(TypedDict):
    """Version of the proxy."""

    version: str


async def version(request: web.Request) -> JsonResponse[Version]:
    """Return the proxy's version."""
    await check_key(request)
    return as_json(Version(version=__version__), request[VISIT].record)


async def settings(request: web.Request) -> JsonResponse[PublicSettings]:
    """Return the settings in force, without secrets, and the instances.

    `epd check --url` and `epd doctor --url` read them.
    """
    visit = request[VISIT]
    shown, hidden = public_settings(visit.config)
    named = (
        instance
        for instance, sources, _ in request.app[REGISTRY].members
        if set(sources) != {InstanceSource.DNS}
    )
    page = PublicSettings(version=__version__, settings=shown, hidden=hidden, instances=rows(named))
    return as_json(page, visit.record)


class Readiness(TypedDict):
    """Statement that the proxy serves requests."""

    status: Literal["ready"]


async def ready(request: web.Request) -> JsonResponse[Readiness]:
    """Report whether this proxy can serve requests: a decode instance has answered.

    The proxy sends no request to an instance for it, so frequent probes are cheap.
    """
    if request.app[DRAIN].began:
        raise Overloaded("the proxy is about to stop", slug="shutting_down")
    visit = request[VISIT]
    decodes_elsewhere = visit.config.decode_from != "table"
    if not (decodes_elsewhere or request.app[TABLE].serves_answered(*ANSWERING)):
        raise NoInstance("no decode instance can be reached", slug="no_decode")
    return as_json(Readiness(status="ready"), visit.record)


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics of all workers for Prometheus."""
    accept = request.headers.get("Accept", "")
    page, content_type = await request.app[METRICS].page(accept)
    headers = response_headers(request[VISIT].record) | {"Content-Type": content_type}
    return web.Response(body=page, headers=headers)


async def start_profile(request: web.Request) -> JsonResponse[ProfilePage]:
    """Start profiling on every instance.

    The body, if any, is forwarded to the instances.
    """
    return await _profile("start", request)


async def stop_profile(request: web.Request) -> JsonResponse[ProfilePage]:
    """Stop profiling on every instance.

    The body, if any, is forwarded to the instances.
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
