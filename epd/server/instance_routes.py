"""`/instances`: the instances of the proxy, and their registration."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from epd.config import ProxyConfig
from epd.discovery.entries import TransferMismatch, registration
from epd.discovery.registrations import Clash, Registrations
from epd.discovery.stores import StoreFailed
from epd.errors import BadRequest, Overloaded, RequestRefused
from epd.routing.health import HealthState
from epd.routing.instances import Instance, Role
from epd.routing.registry import InstanceSource, Registry
from epd.routing.table import InstanceTable
from epd.routing.urls import base_url, is_allowed
from epd.server.app_keys import CONFIG, TABLE, VISIT
from epd.server.intake import may_administer, read_json
from epd.server.responses import JsonResponse, as_json
from epd.transfer.kv import KVTransfer
from epd.transfer.registry import load_ec_transfer

LIVE = frozenset({HealthState.HEALTHY, HealthState.TRIAL})

OtherSource = Literal[InstanceSource.CONFIG, InstanceSource.FILE, InstanceSource.DNS]
"""Sources of instances other than their registration."""


class RoleUrls(TypedDict):
    """URLs of the instances of one role."""

    live: list[str]
    """Instances that get requests."""
    evicted: list[str]
    """Instances that are ejected or down."""


class ReportedLoad(TypedDict):
    """Requests at an instance, from all its clients, as it has reported them."""

    waiting: int
    running: int


class InstanceRow(TypedDict):
    """Details of one instance, as the process that answers sees it."""

    url: str
    role: Role
    dp_size: int
    kv_addr: str
    state: HealthState | Literal["draining"]
    load: int
    """Running requests of the process that answers."""
    weight: float
    """Relative weight of the instance. 0 drains it: no new requests unless no other instance is
    available."""
    reported: ReportedLoad | None
    """Load that the instance has reported; null if there is no recent report."""
    prefix_cache: Literal["estimated", "precise"]
    """Source of what the process that answers knows of the instance's prefix cache. `precise`: its
    KV events (`--kv-events`)."""
    sources: list[InstanceSource]
    since: datetime | None
    """Time at which the instance was added; null if it was removed."""


class InstancesPage(TypedDict):
    """Instances by role, and their details for operators."""

    encode: RoleUrls
    prefill: RoleUrls
    decode: RoleUrls
    prefill_decode: RoleUrls
    instances: NotRequired[list[InstanceRow]]
    """Removed instances with running requests have the state `draining`."""


class Registered(TypedDict):
    """Result of a registration."""

    registered: bool
    """False if it was registered already."""


class Unregistered(TypedDict):
    """Result of the removal of a registration."""

    removed: bool
    still_named_by: NotRequired[list[OtherSource]]
    """Other sources that name the instance, so that it stays."""


REGISTRY = web.AppKey("registry", Registry)
REGISTRATIONS = web.AppKey("registrations", Registrations)
KV_TRANSFER: web.AppKey[KVTransfer] = web.AppKey("kv_transfer")


async def list_instances(request: web.Request) -> JsonResponse[InstancesPage]:
    """List the instances.

    With the admin key (without a configured one, where the operator's other routes answer without
    it) the response has details of each instance.
    """
    table = request.app[TABLE]
    page = InstancesPage(
        encode=_urls(table, Role.ENCODE),
        prefill=_urls(table, Role.PREFILL),
        decode=_urls(table, Role.DECODE),
        prefill_decode=_urls(table, Role.PREFILL_DECODE),
    )
    if may_administer(request):
        members = request.app[REGISTRY].members
        present = {instance for instance, *_ in members}
        leaving = [instance for instance in table.under_way if instance not in present]
        page["instances"] = [
            *(_row(table, *member) for member in members),
            *(_row(table, removed) for removed in leaving),
        ]
    return as_json(page, request[VISIT].record)


def _urls(table: InstanceTable, role: Role) -> RoleUrls:
    urls = RoleUrls(live=[], evicted=[])
    for instance in table.of_roles(role):
        urls["live" if table.state(instance) in LIVE else "evicted"].append(instance.url)
    return urls


def _row(
    table: InstanceTable,
    instance: Instance,
    sources: Sequence[InstanceSource] = (),
    since_s: float | None = None,
) -> InstanceRow:
    """Return the details of an instance; without the time of its addition, of a removed one."""
    since = None if since_s is None else datetime.fromtimestamp(since_s, UTC)
    load = None if since_s is None else table.load(instance)
    report = None if load is None else load.report
    reported = report and ReportedLoad(waiting=report.waiting, running=report.running)
    return {
        "url": instance.url,
        "role": instance.role,
        "dp_size": instance.dp_size,
        "kv_addr": instance.kv_addr,
        "state": "draining" if since_s is None else table.state(instance),
        "load": table.under_way.get(instance, 0),
        "weight": instance.weight,
        "reported": reported,
        "prefix_cache": "precise" if load is not None and load.precise else "estimated",
        "sources": list(sources),
        "since": since and since.replace(microsecond=0),
    }


async def register_instance(request: web.Request) -> JsonResponse[Registered]:
    """Register an instance.

    Needs `--dynamic-registration`.
    """
    body, app = await read_json(request), request.app
    config = app[CONFIG]
    _check_dynamic(config)
    try:
        entry = registration(body)
        entry.check_transfer(config.ec_transfer, pushed=load_ec_transfer(config.ec_transfer).pushed)
        instance = entry.instance
        app[KV_TRANSFER].check(instance)
    except TransferMismatch as error:
        raise BadRequest(str(error), slug="unsupported_ec_transfer") from None
    except ValueError as error:
        raise _invalid(error) from None
    hosts = config.registration_hosts
    if not all(is_allowed(url, hosts) for url in _addresses_of(instance)):
        raise RequestRefused(
            403, "--registration-hosts does not name this host", slug="host_not_allowed"
        )
    try:
        is_new = await app[REGISTRATIONS].add(instance)
    except Clash as clash:
        raise RequestRefused(409, str(clash), slug="instance_conflict") from None
    except StoreFailed as error:
        raise _unwritten() from error
    return as_json(Registered(registered=is_new), request[VISIT].record)


async def unregister_instance(request: web.Request) -> JsonResponse[Unregistered]:
    """Remove the registration of an instance.

    Needs `--dynamic-registration`. Running requests are not interrupted.
    """
    app = request.app
    _check_dynamic(app[CONFIG])
    try:
        url = base_url(request.query.get("url", ""))
    except ValueError as error:
        raise _invalid(f"url: {error}") from None
    try:
        answer = Unregistered(removed=await app[REGISTRATIONS].remove(url))
    except StoreFailed as error:
        raise _unwritten() from error
    sources = app[REGISTRY].sources(url)
    if others := [source for source in sources if source is not InstanceSource.API]:
        answer["still_named_by"] = others
    return as_json(answer, request[VISIT].record)


def _check_dynamic(config: ProxyConfig) -> None:
    if not config.dynamic_registration:
        raise RequestRefused(
            404, "the proxy runs without --dynamic-registration", slug="unknown_route"
        )


def _addresses_of(instance: Instance) -> list[str]:
    """Return all addresses of an instance that the proxy or other instances connect to, as URLs."""
    kv_addr = instance.kv_addr if "://" in instance.kv_addr else f"//{instance.kv_addr}"
    events = [instance.kv_events] if instance.kv_events and "*" not in instance.kv_events else []
    return [instance.url, *([kv_addr] if instance.kv_addr else ()), *instance.ec_zmq_addrs, *events]


def _invalid(reason: object) -> RequestRefused:
    return RequestRefused(422, str(reason), slug="invalid_instance")


def _unwritten() -> Overloaded:
    return Overloaded(
        "the store of registrations cannot be used: nothing has changed", slug="no_registrations"
    )
