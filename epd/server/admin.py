"""Requests that the proxy itself sends to all instances, or to one for its models."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from epd.api.body import Pieces
from epd.config import ProxyConfig
from epd.errors import ProxyError, RequestRefused, Stage, UpstreamRejected
from epd.json_or_none import json_or_none
from epd.routing.balance import Choice
from epd.routing.instances import ANSWERING, Instance, Role
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable
from epd.upstream import Upstream, WholeReply

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


class InstanceStatus(TypedDict):
    """Status of one instance's response; null and an error without a response."""

    status: int | None
    error: NotRequired[str]


class ProfilerStatus(InstanceStatus):
    """Response of one instance to a command for its profiler, with a JSON body if it has one."""

    body: NotRequired[Any]


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

    async def profile(self, command: str, headers: Mapping[str, str], body: bytes) -> ProfilePage:
        """Send the command to start or to stop profiling to every instance of every stage.

        Raises:
            RequestRefused: no instance has a profiler (503).
        """
        results = await self.ask_all(f"/{command}_profile", PROFILE_TIMEOUT_S, headers, (body,))
        missing = HTTPStatus.NOT_FOUND
        if all(
            isinstance(result, WholeReply) and result.status == missing
            for result in results.values()
        ):
            raise RequestRefused(503, "no instance has a profiler", slug="profile_unavailable")
        return {
            stage: replies
            for stage, roles in CLUSTERS.values()
            if (
                replies := {
                    instance.url: _profiler_status(result)
                    for instance, result in results.items()
                    if instance.role in roles
                }
            )
        }

    async def of_decode(self, path: str, headers: Mapping[str, str]) -> WholeReply:
        """Return the answer of one decode instance to `GET` of this path.

        Raises:
            ProxyError: the instance failed, or its status was not 2xx.
        """
        tried: list[Instance] = []
        with self._retries.tries(MODELS_TRIES) as tries:
            while True:
                try:
                    tried.append(self._models.best_instance(tried, balance="round_robin"))
                    reply = await self._upstream.fetch(
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
        if not reply.ok:
            raise UpstreamRejected(reply.status, reply.body, stage="decode", headers=reply.headers)
        return reply

    async def ask_all(
        self,
        path: str,
        timeout_s: float,
        headers: Mapping[str, str] = MappingProxyType({}),
        body: Pieces | None = None,
    ) -> dict[Instance, WholeReply | ProxyError]:
        """Return the reply of every instance: to `GET`, or with a body to `POST`."""
        instances = self._table.of_roles(*Role)

        async def ask_instance(instance: Instance) -> WholeReply | ProxyError:
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

        replies = await asyncio.gather(*map(ask_instance, instances))
        return dict(zip(instances, replies, strict=True))


ADMIN = web.AppKey("admin", Admin)


def status_of(result: WholeReply | ProxyError) -> InstanceStatus:
    """Return the status of a reply, or the error in place of one."""
    if isinstance(result, WholeReply):
        return {"status": result.status}
    return {"status": None, "error": result.message}


def _profiler_status(result: WholeReply | ProxyError) -> ProfilerStatus:
    if isinstance(result, ProxyError):
        return {"status": None, "error": result.message}
    body = json_or_none(result.body)
    return {"status": result.status} if body is None else {"status": result.status, "body": body}
