"""Instances of the proxy, and their registration at `/instances`."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from epd.config import ProxyConfig
from epd.discovery.entries import EntriesInvalid, TransferMismatch, registration
from epd.discovery.membership import Clash, Registrations
from epd.discovery.stores import StoreFailed
from epd.errors import BadRequest, Overloaded, RequestRefused
from epd.routing.health import HealthState
from epd.routing.instances import Instance, InstanceSource, Registry, Role
from epd.routing.table import InstanceTable
from epd.routing.urls import base_url, is_allowed
from epd.transfer.kv import KVTransfer
from epd.transfer.registry import EC_TRANSFERS

LIVE = frozenset({HealthState.HEALTHY, HealthState.TRIAL})


class Roster:
    """Content of `/instances`: that of vLLM's `disagg_epd_proxy.py`, and details for operators."""

    def __init__(
        self,
        registry: Registry,
        table: InstanceTable,
        registrations: Registrations,
        transfer: KVTransfer,
        config: ProxyConfig,
    ) -> None:
        self._registry = registry
        self._table = table
        self._registrations = registrations
        self._transfer = transfer
        self._open = config.dynamic_registration
        self._hosts = config.registration_hosts
        self._ec_transfer = config.ec_transfer

    def instances_page(self, *, detailed: bool) -> dict[str, Any]:
        """Return the URLs of the live and of the ejected instances (`evicted`), by role.

        Args:
            detailed: whether the page describes each instance. It then includes removed instances
                that still have running requests (`draining`).
        """
        page: dict[str, Any] = {
            role.value: {
                "live": [one.url for one in self._table.of_roles(role) if self._live(one)],
                "evicted": [one.url for one in self._table.of_roles(role) if not self._live(one)],
            }
            for role in Role
        }
        return page | {"instances": self._rows()} if detailed else page

    async def register(self, body: bytes) -> dict[str, Any]:
        """Register the instance that a body describes.

        Raises:
            RequestRefused: 404 without `--dynamic-registration`; 422 if the body does not describe
                an instance, or the KV transfer does not support it; 403 if its host, or the host
                of one of its addresses, may not be registered; 409 if it conflicts with a
                registered instance.
            BadRequest: the instance uses another encoder-cache transfer than the proxy.
            Overloaded: the store of registrations cannot be used.
        """
        self._check_open()
        try:
            wanted = registration(body)
            wanted.check_transfer(self._ec_transfer, pushed=EC_TRANSFERS[self._ec_transfer].pushed)
        except EntriesInvalid as error:
            raise RequestRefused(422, str(error), slug="invalid_instance") from None
        except TransferMismatch as error:
            raise BadRequest(str(error), slug="unsupported_ec_transfer") from None
        self._check_fits(wanted.instance)
        if not all(is_allowed(url, self._hosts) for url in _addresses_of(wanted.instance)):
            raise RequestRefused(
                403, "--registration-hosts does not name this host", slug="host_not_allowed"
            )
        try:
            return {"registered": await self._registrations.add(wanted.instance)}
        except Clash as clash:
            raise RequestRefused(409, str(clash), slug="instance_conflict") from None
        except StoreFailed as error:
            raise _unwritten() from error

    async def unregister(self, url: str | None) -> dict[str, Any]:
        """Remove the registration of a URL.

        Raises:
            RequestRefused: 404 without `--dynamic-registration`; 422 if the URL is invalid.
            Overloaded: the store of registrations cannot be used.
        """
        self._check_open()
        try:
            known = base_url(url or "")
        except ValueError as error:
            raise RequestRefused(422, f"url: {error}", slug="invalid_instance") from None
        try:
            answer: dict[str, Any] = {"removed": await self._registrations.remove(known)}
        except StoreFailed as error:
            raise _unwritten() from error
        others = [
            source for source in self._registry.sources(known) if source is not InstanceSource.API
        ]
        return answer | {"still_named_by": others} if others else answer

    def _check_open(self) -> None:
        if not self._open:
            raise RequestRefused(
                404, "the proxy runs without --dynamic-registration", slug="unknown_route"
            )

    def _check_fits(self, instance: Instance) -> None:
        try:
            self._transfer.check(instance)
        except ValueError as error:
            raise RequestRefused(422, str(error), slug="invalid_instance") from None

    def _live(self, instance: Instance) -> bool:
        return self._table.state(instance) in LIVE

    def _rows(self) -> list[dict[str, Any]]:
        members = self._registry.members
        present = {one for one, *_ in members}
        rows = [
            self._row(one, self._table.state(one), sources, since_s)
            for one, sources, since_s in members
        ]
        leaving = [one for one in self._table.under_way if one not in present]
        return rows + [self._row(one, "draining", (), None) for one in leaving]

    def _row(
        self, one: Instance, state: str, sources: Sequence[InstanceSource], since_s: float | None
    ) -> dict[str, Any]:
        since = None if since_s is None else datetime.fromtimestamp(since_s, UTC)
        report = None if since_s is None else self._table.load(one).report
        said = report and {"waiting": report.waiting, "running": report.running}
        precise = since_s is not None and self._table.load(one).precise
        return {
            "url": one.url,
            "role": one.role,
            "dp_size": one.dp_size,
            "kv_addr": one.kv_addr,
            "state": state,
            "load": self._table.under_way.get(one, 0),
            "weight": one.weight,
            "reported": said,
            "prefix_cache": "precise" if precise else "estimated",
            "sources": sources,
            "since": since and since.isoformat(timespec="seconds"),
        }


def _addresses_of(one: Instance) -> list[str]:
    """Return all addresses of an instance that the proxy or other instances connect to, as URLs."""
    kv_addr = one.kv_addr if "://" in one.kv_addr else f"//{one.kv_addr}"
    events = [one.kv_events] if one.kv_events and "*" not in one.kv_events else []
    return [one.url, *([kv_addr] if one.kv_addr else ()), *one.ec_zmq_addrs, *events]


def _unwritten() -> Overloaded:
    return Overloaded(
        "the store of registrations cannot be used: nothing has changed", slug="no_registrations"
    )
