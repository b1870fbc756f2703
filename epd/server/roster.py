"""`/instances`: who takes part, and who may from now on."""

from datetime import UTC, datetime
from typing import Any

from epd.config import ProxyConfig
from epd.discovery.entries import EntriesInvalid, UnknownTransfer, registration
from epd.discovery.registrations import Clash, Registrations
from epd.discovery.stores import StoreFailed
from epd.errors import BadRequest, Overloaded, RequestRefused
from epd.routing.allowed import is_allowed
from epd.routing.health import State
from epd.routing.instances import Instance, InstanceTable, Role
from epd.routing.load import Load
from epd.routing.registry import Registry, Source
from epd.routing.urls import base_url

LIVE = frozenset({State.HEALTHY, State.TRIAL})


class Roster:
    """Answers as vLLM's `disagg_epd_proxy.py` does, and says more to the operator."""

    def __init__(
        self,
        registry: Registry,
        table: InstanceTable,
        registrations: Registrations,
        config: ProxyConfig,
    ) -> None:
        self._registry = registry
        self._table = table
        self._registrations = registrations
        self._open = config.dynamic_registration
        self._hosts = config.registration_hosts

    def page(self, *, detailed: bool) -> dict[str, Any]:
        """By role, the URLs of the instances that requests go to, and of those that are left alone.

        Args:
            detailed: whether each is described, those among them that have requests to end and get
                no new ones: `draining`.
        """
        page: dict[str, Any] = {
            role.value: {
                "live": [one.url for one in self._table.of(role) if self._lives(one)],
                "evicted": [one.url for one in self._table.of(role) if not self._lives(one)],
            }
            for role in Role
        }
        return page | {"instances": self._rows()} if detailed else page

    async def register(self, body: bytes) -> dict[str, Any]:
        """Let the instance that a body describes take part.

        Raises:
            RequestRefused: 404 without `--dynamic-registration`; 422, the body describes none; 403,
                its host may not be registered; 409, it does not go with those that take part.
            BadRequest: it uses a transfer that there is not.
            Overloaded: the store of registrations cannot be used.
        """
        self._check_open()
        try:
            wanted = registration(body)
            wanted.check_transfer()
        except EntriesInvalid as error:
            raise RequestRefused(422, str(error), slug="invalid_instance") from None
        except UnknownTransfer as error:
            raise BadRequest(str(error), slug="unsupported_ec_transfer") from None
        if not is_allowed(wanted.url, self._hosts):
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
        """Take back the registration of a URL.

        Raises:
            RequestRefused: 404 without `--dynamic-registration`; 422, it is no URL.
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
        others = [source for source in self._registry.sources(known) if source is not Source.API]
        return answer | {"still_named_by": others} if others else answer

    def _check_open(self) -> None:
        if not self._open:
            raise RequestRefused(
                404, "the proxy runs without --dynamic-registration", slug="unknown_route"
            )

    def _lives(self, instance: Instance) -> bool:
        return self._table.state(instance) in LIVE

    def _rows(self) -> list[dict[str, Any]]:
        members = self._registry.members
        under_way = self._table.under_way
        rows: list[dict[str, Any]] = [
            {
                "url": one.url,
                "role": one.role,
                "dp_size": one.dp_size,
                "state": self._table.state(one),
                "load": under_way.get(one, 0),
                **_weighed(self._table.load(one)),
                "sources": sources,
                "since": datetime.fromtimestamp(since_s, UTC).isoformat(timespec="seconds"),
            }
            for one, sources, since_s in members
        ]
        present = {one for one, *_ in members}
        rows += [
            {
                "url": one.url,
                "role": one.role,
                "dp_size": one.dp_size,
                "state": "draining",
                "load": requests,
                "weight": one.weight,
                "reported": None,
                "sources": [],
                "since": None,
            }
            for one, requests in under_way.items()
            if one not in present
        ]
        return rows


def _weighed(load: Load) -> dict[str, Any]:
    report = load.report
    said = report and {"waiting": report.waiting, "running": report.running}
    return {"weight": load.weight, "reported": said}


def _unwritten() -> Overloaded:
    return Overloaded(
        "the store of registrations cannot be used: nothing has changed", slug="no_registrations"
    )
