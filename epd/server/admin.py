"""Requests that the proxy sends to all instances: health, versions, profiling, models."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar

from aiohttp import web

from epd.aio import Flights
from epd.api.body import Pieces
from epd.config import ProxyConfig
from epd.errors import Outcome, ProxyError, RequestRefused, Stage, UpstreamRejected
from epd.json_or_none import json_or_none
from epd.observe.metric_defs import CONVERSATIONS, CONVERSATIONS_EVICTED, Figure
from epd.observe.metrics import MetricsObserver
from epd.request.recovery import retry_delay_s
from epd.routing.balance import Choice
from epd.routing.condition import UNANSWERED, WELL, WORST, Condition, condition
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

MAX_VERSION = 64
"""Upper bound of the characters of an instance's version in `/version`."""

MODELS_TRIES = 2
"""Upper bound of the decode instances that one `/v1/models` request tries."""
PROFILE_TIMEOUT_S = 300.0
"""Maximum time for an instance's response to `/start_profile` and `/stop_profile`."""

KEPT_S = 1.0
"""Lifetime of a cached answer of all instances, in seconds. `GET /health` needs no key: without
this cache, each request for it would open a connection to every instance."""

ClusterState = Literal["healthy", "degraded", "unhealthy", "empty"]
"""State of a stage. `degraded`: some of its instances are not healthy. `unhealthy`: no instance
answers."""


class InstanceStatus(TypedDict):
    """Response of one instance to a request that the proxy has sent to all instances."""

    status: int | None
    """Status of the response; null without a response."""
    error: NotRequired[str]
    """Failure, if there was no response."""


class ProfilerStatus(InstanceStatus):
    """Response of one instance to a command for its profiler."""

    body: NotRequired[Any]
    """JSON body of the response, if it has one."""


class InstanceHealth(InstanceStatus):
    """Health of one instance: its response to `GET /health`, and its condition in each role."""

    roles: list[Role]
    routing: dict[str, Condition]
    """Condition of the instance in each role."""
    state: Condition
    """The worst of these conditions."""


class ConversationCounts(TypedDict):
    """Numbers of conversations, in all workers; null for a number that is not counted."""

    kept: int | None
    """Conversations that the next turn can find; null if they are in Redis."""
    evicted: int | None
    """Conversations removed before a turn found them: no room, expired, or their decode instance
    was lost."""


class HealthPage(TypedDict):
    """Health of the proxy, of each stage, and of each instance."""

    proxy: Literal["healthy", "degraded"]
    """`degraded`: no instance of a stage answers, but other stages do its work."""
    encode_cluster: ClusterState
    prefill_cluster: ClusterState
    decode_cluster: ClusterState
    conversations: ConversationCounts
    instances: dict[str, InstanceHealth]
    """Instances by URL."""


Health = tuple[int, HealthPage]
"""Status and body of `GET /health`."""

ProfilePage = dict[str, dict[str, ProfilerStatus]]
"""Response of each instance to a command for its profiler, by stage and URL."""

T = TypeVar("T")


class CachedResult(Generic[T]):
    """Cache of one answer of all instances, for `KEPT_S`. Concurrent misses share one lookup."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._flights: Flights[None, T] = Flights()
        self._answer: T | None = None
        self._until_s = 0.0

    async def get(self) -> T:
        if self._answer is not None and asyncio.get_running_loop().time() < self._until_s:
            return self._answer
        return await self._flights.join(None, self._ask_and_keep)

    async def _ask_and_keep(self) -> T:
        answer = self._answer = await self._ask()
        self._until_s = asyncio.get_running_loop().time() + KEPT_S
        return answer


class Admin:
    """Client that sends a request to every instance of a table.

    Attributes:
        health: returns the status and the body of `GET /health`.
        versions: returns the vLLM version that each instance reports, by URL; None if it reports
            none.
    """

    def __init__(
        self,
        table: InstanceTable,
        upstream: Upstream,
        config: ProxyConfig,
        metrics: MetricsObserver,
    ) -> None:
        self._table = table
        self._metrics = metrics
        self._upstream = upstream
        self._config = config
        # A separate choice: these requests must not advance the round robin of the decode stage.
        self._models = Choice(table, *ANSWERING)
        self._retries = Retries()
        self.health = CachedResult(self._ask_health).get
        self.versions = CachedResult(self._ask_versions).get

    async def _ask_versions(self) -> dict[str, str | None]:
        timeout_s = self._config.health_timeout_s
        results = await self._ask_all("/version", timeout_s)
        return {instance.url: _version(result) for instance, result in results.items()}

    async def _ask_health(self) -> Health:
        """Return the answer to `GET /health`.

        Its status is 503 if a stage is `unhealthy` and no other stage may do its work.
        """
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
                {"roles": [], "routing": {}, "state": found, **_json(results[instance])},
            )
            entry["roles"].append(instance.role)
            entry["routing"][instance.role.value] = found
            entry["state"] = max(entry["routing"].values(), key=WORST.index)
        missing = {name for name, state in clusters.items() if state == "unhealthy"}
        spared = missing <= self._replaceable()
        return 200 if spared else 503, HealthPage(
            proxy="degraded" if missing and spared else "healthy",
            encode_cluster=clusters["encode_cluster"],
            prefill_cluster=clusters["prefill_cluster"],
            decode_cluster=clusters["decode_cluster"],
            conversations=self._counts(),
            instances=shown,
        )

    def _replaceable(self) -> set[str]:
        """Return the stages for which others may do the work."""
        config, found = self._config, set[str]()
        if config.on_encode_failure == "local" and not EC_TRANSFERS[config.ec_transfer].pushed:
            found.add("encode_cluster")
        if config.on_prefill_failure == "local":
            found.add("prefill_cluster")
        return found

    def _counts(self) -> ConversationCounts:
        """Return the numbers of conversations of all workers; None for a metric without samples."""
        shown = {family.name: family.samples for family in self._metrics.shown.collect()}

        def count(figure: Figure) -> int | None:
            return int(shown[figure.name][0].value) if shown[figure.name] else None

        return ConversationCounts(kept=count(CONVERSATIONS), evicted=count(CONVERSATIONS_EVICTED))

    async def profile(self, command: str, headers: Mapping[str, str], body: bytes) -> ProfilePage:
        """Send the command to start or to stop profiling to every instance of every stage.

        Returns:
            Status and JSON body, or error, of each instance, by stage and URL.

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
                    delay_s = retry_delay_s(error, others=self._models.has_untried(tried))
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


def _version(result: Answer | ProxyError) -> str | None:
    match json_or_none(result.body) if isinstance(result, Answer) and result.ok else None:
        case {"version": str() as version}:
            return version[:MAX_VERSION]
        case _:
            return None


def _json(result: Answer | ProxyError) -> InstanceStatus:
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
    if WELL.issuperset(conditions):
        return "healthy"
    return "unhealthy" if UNANSWERED.issuperset(conditions) else "degraded"
