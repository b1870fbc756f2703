"""Instances of the proxy, and their registration at `/instances`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NotRequired, TypedDict

from epd.config import ProxyConfig
from epd.discovery.entries import EntriesInvalid, TransferMismatch, registration
from epd.discovery.membership import Clash, Registrations
from epd.discovery.stores import StoreFailed
from epd.errors import BadRequest, Overloaded, RequestRefused
from epd.routing.health import HealthState
from epd.routing.instances import Instance, Role
from epd.routing.registry import InstanceSource, Registry
from epd.routing.table import InstanceTable
from epd.routing.urls import base_url, is_allowed
from epd.transfer.kv import KVTransfer
from epd.transfer.registry import EC_TRANSFERS

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
    """Number of data-parallel ranks of the instance."""
    kv_addr: str
    """Address of its KV connector."""
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
    """Details of each instance. Removed instances with running requests have the state `draining`.
    """


class Registered(TypedDict):
    """Result of a registration."""

    registered: bool
    """Whether the instance is new."""


class Unregistered(TypedDict):
    """Result of the removal of a registration."""

    removed: bool
    """Whether there was a registration."""
    still_named_by: NotRequired[list[OtherSource]]
    """Other sources that name the instance, so that it stays."""


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """Content of `/instances`: that of vLLM's `disagg_epd_proxy.py`, and details for operators."""

    _registry: Registry
    _table: InstanceTable
    _registrations: Registrations
    _transfer: KVTransfer
    _config: ProxyConfig

    def instances_page(self, *, detailed: bool) -> InstancesPage:
        """Return the URLs of the instances by role, and if `detailed` a description of each."""
        page = InstancesPage(
            encode=self._urls(Role.ENCODE),
            prefill=self._urls(Role.PREFILL),
            decode=self._urls(Role.DECODE),
            prefill_decode=self._urls(Role.PREFILL_DECODE),
        )
        if detailed:
            page["instances"] = self._rows()
        return page

    async def register(self, body: bytes) -> Registered:
        """Register the instance that a body describes; errors as in `register_instance`."""
        self._check_open()
        transfer = self._config.ec_transfer
        try:
            wanted = registration(body)
            wanted.check_transfer(transfer, pushed=EC_TRANSFERS[transfer].pushed)
        except EntriesInvalid as error:
            raise _invalid(error) from None
        except TransferMismatch as error:
            raise BadRequest(str(error), slug="unsupported_ec_transfer") from None
        instance, hosts = wanted.instance, self._config.registration_hosts
        try:
            self._transfer.check(instance)
        except ValueError as error:
            raise _invalid(error) from None
        if not all(is_allowed(url, hosts) for url in _addresses_of(instance)):
            raise RequestRefused(
                403, "--registration-hosts does not name this host", slug="host_not_allowed"
            )
        try:
            return {"registered": await self._registrations.add(instance)}
        except Clash as clash:
            raise RequestRefused(409, str(clash), slug="instance_conflict") from None
        except StoreFailed as error:
            raise _unwritten() from error

    async def unregister(self, url: str | None) -> Unregistered:
        """Remove the registration of a URL; errors as in `unregister_instance`."""
        self._check_open()
        try:
            known = base_url(url or "")
        except ValueError as error:
            raise _invalid(f"url: {error}") from None
        try:
            answer = Unregistered(removed=await self._registrations.remove(known))
        except StoreFailed as error:
            raise _unwritten() from error
        sources = self._registry.sources(known)
        if others := [source for source in sources if source is not InstanceSource.API]:
            answer["still_named_by"] = others
        return answer

    def _check_open(self) -> None:
        if not self._config.dynamic_registration:
            raise RequestRefused(
                404, "the proxy runs without --dynamic-registration", slug="unknown_route"
            )

    def _urls(self, role: Role) -> RoleUrls:
        urls = RoleUrls(live=[], evicted=[])
        for instance in self._table.of_roles(role):
            is_live = self._table.state(instance) in LIVE
            urls["live" if is_live else "evicted"].append(instance.url)
        return urls

    def _rows(self) -> list[InstanceRow]:
        members = self._registry.members
        present = {instance for instance, *_ in members}
        leaving = [instance for instance in self._table.under_way if instance not in present]
        return [self._row(*member) for member in members] + [self._row(gone) for gone in leaving]

    def _row(
        self,
        instance: Instance,
        sources: Sequence[InstanceSource] = (),
        since_s: float | None = None,
    ) -> InstanceRow:
        """Return the details of an instance; without the time of its addition, of a removed one."""
        since = None if since_s is None else datetime.fromtimestamp(since_s, UTC)
        load = None if since_s is None else self._table.load(instance)
        report = None if load is None else load.report
        reported = report and ReportedLoad(waiting=report.waiting, running=report.running)
        precise = load is not None and load.precise
        return {
            "url": instance.url,
            "role": instance.role,
            "dp_size": instance.dp_size,
            "kv_addr": instance.kv_addr,
            "state": "draining" if since_s is None else self._table.state(instance),
            "load": self._table.under_way.get(instance, 0),
            "weight": instance.weight,
            "reported": reported,
            "prefix_cache": "precise" if precise else "estimated",
            "sources": list(sources),
            "since": since and since.replace(microsecond=0),
        }


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
