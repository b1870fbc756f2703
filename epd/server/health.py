"""`GET /health`: the health of the proxy, of each stage, and of each instance."""

import asyncio
from collections.abc import Sequence
from typing import Literal

from aiohttp import web
from typing_extensions import TypedDict

from epd.aio import Flights
from epd.config import ProxyConfig
from epd.errors import Outcome, ProxyError
from epd.routing.condition import Condition, condition
from epd.routing.health import HealthState
from epd.routing.instances import Role
from epd.routing.table import InstanceTable
from epd.server.admin import CLUSTERS, Admin, InstanceStatus, status_of
from epd.transfer.registry import load_ec_transfer
from epd.upstream import WholeReply

FRESH_S = 1.0
"""Lifetime of a cached `GET /health`, in seconds. It needs no key: without this cache, each request
for it would open a connection to every instance."""

ClusterState = Literal["healthy", "degraded", "unhealthy", "empty"]
"""State of a stage. `degraded`: some of its instances are not healthy. `unhealthy`: no instance
answers."""


class InstanceHealth(InstanceStatus):
    """Health of one instance: its response to `GET /health`, and its condition in each role."""

    roles: list[Role]
    routing: dict[str, Condition]
    state: Condition
    """The worst one of `routing`."""


class HealthPage(TypedDict):
    """Health of the proxy, of each stage, and of each instance."""

    proxy: Literal["healthy", "degraded"]
    """`degraded`: no instance of a stage answers, but other stages do its work."""
    encode_cluster: ClusterState
    prefill_cluster: ClusterState
    decode_cluster: ClusterState
    instances: dict[str, InstanceHealth]


class HealthCheck:
    """Health of the instances of a table, which are asked at most once in `FRESH_S`."""

    def __init__(self, table: InstanceTable, admin: Admin, config: ProxyConfig) -> None:
        self._table = table
        self._admin = admin
        self._config = config
        self._flights: Flights[None, tuple[int, HealthPage]] = Flights()
        self._page: tuple[int, HealthPage] | None = None
        self._until_s = 0.0

    async def page(self) -> tuple[int, HealthPage]:
        """Return the status and the body. Concurrent requests share one look-up."""
        if self._page is not None and asyncio.get_running_loop().time() < self._until_s:
            return self._page
        return await self._flights.join(None, self._renew)

    async def _renew(self) -> tuple[int, HealthPage]:
        self._page = await self._ask()
        self._until_s = asyncio.get_running_loop().time() + FRESH_S
        return self._page

    async def _ask(self) -> tuple[int, HealthPage]:
        groups = {name: self._table.of_roles(*roles) for name, (_, roles) in CLUSTERS.items()}
        states = {instance: self._table.state(instance) for instance in self._table.of_roles(*Role)}
        routed = {
            candidate.instance
            for _, roles in CLUSTERS.values()
            for candidate in self._table.usable_candidates(*roles)
        }
        results = await self._admin.ask_all("/health", self._config.health_timeout_s)
        for instance, result in results.items():
            if isinstance(result, ProxyError) and result.outcome is Outcome.REFUSED:
                self._table.record_refusal(instance)
                states[instance] = HealthState.DOWN
        conditions = {
            instance: condition(
                states[instance],
                answers=isinstance(result, WholeReply) and result.ok,
                routed=instance in routed,
            )
            for instance, result in results.items()
        }
        clusters = {
            name: _cluster_state([conditions[instance] for instance in instances])
            for name, instances in groups.items()
        }
        shown: dict[str, InstanceHealth] = {}
        for instance, found in conditions.items():
            entry = shown.setdefault(
                instance.url,
                {"roles": [], "routing": {}, "state": found, **status_of(results[instance])},
            )
            entry["roles"].append(instance.role)
            entry["routing"][instance.role.value] = found
            entry["state"] = max(entry["routing"].values(), key=[*Condition].index)
        missing = {name for name, state in clusters.items() if state == "unhealthy"}
        spared = missing <= self._replaceable()  # other stages may do their work
        return 200 if spared else 503, HealthPage(
            proxy="degraded" if missing and spared else "healthy",
            encode_cluster=clusters["encode_cluster"],
            prefill_cluster=clusters["prefill_cluster"],
            decode_cluster=clusters["decode_cluster"],
            instances=shown,
        )

    def _replaceable(self) -> set[str]:
        config, found = self._config, set[str]()
        if config.on_encode_failure == "local" and not load_ec_transfer(config.ec_transfer).pushed:
            found.add("encode_cluster")
        if config.on_prefill_failure == "local":
            found.add("prefill_cluster")
        return found


HEALTH = web.AppKey("health", HealthCheck)


def _cluster_state(conditions: Sequence[Condition]) -> ClusterState:
    if not conditions:
        return "empty"
    if all(each.is_well for each in conditions):
        return "healthy"
    return "degraded" if any(each.answers for each in conditions) else "unhealthy"
