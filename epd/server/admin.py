"""Requests that the proxy sends to all instances: health and profiling, and to one for models."""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Literal, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from epd.aio import Flights
from epd.api.body import Pieces
from epd.config import ProxyConfig
from epd.errors import Outcome, ProxyError, RequestRefused, Stage, UpstreamRejected
from epd.json_or_none import json_or_none
from epd.routing.balance import Choice
from epd.routing.condition import Condition, condition
from epd.routing.health import HealthState
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable
from epd.transfer.registry import EC_TRANSFERS
from epd.upstream import Answer, Upstream

CLUSTERS: Mapping[str, tuple[Stage, tuple[Role, ...]]] = {
    "encode_cluster": ("encode", (Role.ENCODE,)),
    "prefill_cluster": ("prefill", (Role.PREFILL,)),
    "decode_cluster": ("decode", (Role.DECODE, Role.PREFILL_DECODE)),
}
"""Stages, under the names that vLLM's `disagg_epd_proxy.py` gives them in `/health`."""

STAGE: Mapping[Role, Stage] = {role: stage for stage, roles in CLUSTERS.values() for role in roles}

MODELS_TRIES = 2
"""Upper bound of the decode instances that one `/v1/models` request tries."""
PROFILE_TIMEOUT_S = 300.0
"""Maximum time for an instance's response to `/start_profile` and `/stop_profile`."""

KEPT_S = 1.0
"""Lifetime of a cached `GET /health`, in seconds. It needs no key: without this cache, each request
for it would open a connection to every instance."""

ClusterState = Literal["healthy", "degraded", "unhealthy", "empty"]
"""State of a stage. `degraded`: some of its instances are not healthy. `unhealthy`: no instance
answers."""


class InstanceStatus(TypedDict):
    """Status of one instance's response; null and an error without a response."""

    status: int | None
    error: NotRequired[str]


class ProfilerStatus(InstanceStatus):
    """Response of one instance to a command for its profiler, with a JSON body if it has one."""

    body: NotRequired[Any]


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


ProfilePage = dict[str, dict[str, ProfilerStatus]]
"""Response of each instance to a command for its profiler, by stage and URL."""


class Admin:
    """Client that sends a request to every instance of a table."""

    def __init__(
        self,
        table: InstanceTable,
        upstream: Upstream,
        config: ProxyConfig,
    ) -> None:
        self._table = table
        self._upstream = upstream
        self._config = config
        # A separate choice: these requests must not advance the round robin of the decode stage.
        self._models = Choice(table, *ANSWERING)
        self._retries = Retries()
        self._asking: Flights[None, tuple[int, HealthPage]] = Flights()
        self._health: tuple[int, HealthPage] | None = None
        self._until_s = 0.0

    async def health(self) -> tuple[int, HealthPage]:
        """Return the status and the body of `GET /health`. Concurrent requests share one lookup."""
        if self._health is not None and asyncio.get_running_loop().time() < self._until_s:
            return self._health
        return await self._asking.join(None, self._ask_and_keep)

    async def _ask_and_keep(self) -> tuple[int, HealthPage]:
        self._health = await self._ask_health()
        self._until_s = asyncio.get_running_loop().time() + KEPT_S
        return self._health

    async def _ask_health(self) -> tuple[int, HealthPage]:
        groups = {name: self._table.of_roles(*roles) for name, (_, roles) in CLUSTERS.items()}
        states = {instance: self._table.state(instance) for instance in self._table.of_roles(*Role)}
        routed = {
            candidate.instance
            for _, roles in CLUSTERS.values()
            for candidate in self._table.usable_candidates(*roles)
        }
        results = await self._ask_all("/health", self._config.health_timeout_s)
        for instance, result in results.items():
            if isinstance(result, ProxyError) and result.outcome is Outcome.REFUSED:
                self._table.record_refusal(instance)
                states[instance] = HealthState.DOWN
        conditions = {
            instance: condition(
                states[instance],
                answers=isinstance(result, Answer) and result.ok,
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
                {"roles": [], "routing": {}, "state": found, **_status(results[instance])},
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
        if config.on_encode_failure == "local" and not EC_TRANSFERS[config.ec_transfer].pushed:
            found.add("encode_cluster")
        if config.on_prefill_failure == "local":
            found.add("prefill_cluster")
        return found

    async def profile(self, command: str, headers: Mapping[str, str], body: bytes) -> ProfilePage:
        """Send the command to start or to stop profiling to every instance of every stage.

        Raises:
            RequestRefused: no instance has a profiler (503).
        """
        results = await self._ask_all(f"/{command}_profile", PROFILE_TIMEOUT_S, headers, (body,))
        missing = HTTPStatus.NOT_FOUND
        if all(
            isinstance(result, Answer) and result.status == missing for result in results.values()
        ):
            raise RequestRefused(503, "no instance has a profiler", slug="profile_unavailable")
        return {
            stage: answers
            for stage, roles in CLUSTERS.values()
            if (
                answers := {
                    instance.url: _profiler_status(result)
                    for instance, result in results.items()
                    if instance.role in roles
                }
            )
        }

    async def of_decode(self, path: str, headers: Mapping[str, str]) -> Answer:
        """Return the answer of one decode instance to `GET` of this path.

        Raises:
            ProxyError: the instance failed, or its status was not 2xx.
        """
        tried: list[Instance] = []
        with self._retries.tries(MODELS_TRIES) as tries:
            while True:
                try:
                    tried.append(self._models.best_instance(tried, balance="round_robin"))
                    answer = await self._upstream.fetch(
                        tried[-1].url + path,
                        stage="decode",
                        headers=headers,
                        timeout_s=self._config.health_timeout_s,
                    )
                    break
                except ProxyError as error:
                    delay_s = error.retry_delay_s(others=self._models.has_untried(tried))
                    if delay_s is None:
                        raise
                    await tries.next_try(error, delay_s)
        if not answer.ok:
            raise UpstreamRejected(
                answer.status, answer.body, stage="decode", headers=answer.headers
            )
        return answer

    async def _ask_all(
        self,
        path: str,
        timeout_s: float,
        headers: Mapping[str, str] = MappingProxyType({}),
        body: Pieces | None = None,
    ) -> dict[Instance, Answer | ProxyError]:
        instances = self._table.of_roles(*Role)

        async def ask_instance(instance: Instance) -> Answer | ProxyError:
            try:
                return await self._upstream.fetch(
                    instance.url + path,
                    stage=STAGE[instance.role],
                    headers=headers,
                    body=body,
                    timeout_s=timeout_s,
                )
            except ProxyError as error:
                return error

        answers = await asyncio.gather(*map(ask_instance, instances))
        return dict(zip(instances, answers, strict=True))


ADMIN = web.AppKey("admin", Admin)


def _status(result: Answer | ProxyError) -> InstanceStatus:
    if isinstance(result, Answer):
        return {"status": result.status}
    return {"status": None, "error": result.message}


def _profiler_status(result: Answer | ProxyError) -> ProfilerStatus:
    if isinstance(result, ProxyError):
        return {"status": None, "error": result.message}
    body = json_or_none(result.body)
    return {"status": result.status} if body is None else {"status": result.status, "body": body}


def _cluster_state(conditions: Sequence[Condition]) -> ClusterState:
    if not conditions:
        return "empty"
    if all(each.is_well for each in conditions):
        return "healthy"
    return "degraded" if any(each.answers for each in conditions) else "unhealthy"
