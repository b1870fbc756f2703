"""Requests about KV blocks outside of the stages: connector facts, and releases.

Some transfers need KV connector facts of a prefill instance in advance. Background requests ask
decode to release the KV blocks of abandoned prefills.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, Self

from epd.aio import Flights
from epd.api.items import Body
from epd.config.sections import Live
from epd.config.sections.limits import LimitSettings
from epd.errors import ProxyError, UpstreamDied
from epd.json_or_none import json_or_none
from epd.request.context import RequestContext
from epd.request.stages import RELEASE_TIMEOUT_S, Stages
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance
from epd.routing.table import InstanceTable
from epd.transfer import Params
from epd.transfer.kv import KVTransfer, Pair
from epd.upstream import Upstream

KNOWN_S = 10.0
"""Lifetime of a fact, in seconds. No replacement of an instance becomes ready faster."""

Member = tuple[Instance, int | None]
"""Prefill instance, and its data-parallel rank if the proxy names one."""


class _Known(NamedTuple):
    peer: Params
    until_s: float


class PeerRegistry:
    """KV connector facts of instances, kept for `KNOWN_S` and dropped after a failure.

    They are queried, or learned from replies.
    """

    def __init__(
        self,
        table: InstanceTable,
        transfer: KVTransfer,
        upstream: Upstream,
        live: Live[LimitSettings],
    ) -> None:
        self._table = table
        self._transfer = transfer
        self._upstream = upstream
        self._live = live
        self._known: dict[Member, _Known] = {}
        self._flights: Flights[Member, Params] = Flights()
        self._clock = asyncio.get_running_loop().time

    async def params_for(self, pair: Pair) -> Params | None:
        """Return the facts of a prefill's connector; None if there are none and no URL to query.

        A failed query counts as a failure of the instance. A successful one has no effect on
        health.

        Raises:
            ProxyError: the connector did not answer the query.
        """
        known = self._known.get(member := _member(pair))
        if known is not None and self._clock() < known.until_s:
            return known.peer
        url = self._transfer.peer_url(pair.prefill)
        if url is None:
            return None
        return await self._flights.join(member, lambda: self._ask(member, url))

    def learn_facts(self, pair: Pair, replied: Params) -> None:
        """Keep the facts in a prefill's reply."""
        if (learned := self._transfer.facts_of_reply(pair, replied)) is not None:
            self._remember(_member(pair), learned)

    def forget_instance(self, instance: Instance) -> None:
        """Drop the facts of all ranks of an instance, which may have been replaced."""
        self._known = {one: known for one, known in self._known.items() if one[0] != instance}

    async def _ask(self, member: Member, url: str) -> Params:
        try:
            answer = await self._upstream.fetch(
                url, stage="prefill", headers={}, timeout_s=self._live.current.health_timeout_s
            )
            peer = self._transfer.parse_peer(json_or_none(answer.body) if answer.ok else None)
        except ProxyError:
            # A success would only show that the port answers, and reset the engine's failures.
            with self._table.track_request(member[0]):
                raise
        self._remember(member, peer)
        return peer

    def _remember(self, member: Member, peer: Params) -> None:
        now_s = self._clock()
        if member not in self._known:  # drop expired entries of instances that left
            self._known = {
                one: known for one, known in self._known.items() if now_s < known.until_s
            }
        self._known[member] = _Known(peer, now_s + KNOWN_S)


def _member(pair: Pair) -> Member:
    return pair.prefill, pair.prefill_rank


class Releases:
    """Releases of KV blocks in progress."""

    def __init__(self, stages: Stages, fatal: FatalRequests) -> None:
        self._stages = stages
        self._fatal = fatal
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def run_releases(cls, stages: Stages, fatal: FatalRequests) -> AsyncIterator[Self]:
        """Wait at the exit for the releases in progress, at most `RELEASE_TIMEOUT_S`."""
        releases = cls(stages, fatal)
        try:
            yield releases
        finally:
            await releases._ended()

    def begin_release(self, instance: Instance, body: Body, context: RequestContext) -> None:
        """Send a release to a decode instance in the background.

        Args:
            instance: the decode instance.
            body: the decode request, with its `kv_transfer_params`.
            context: context of the request.
        """
        task = asyncio.create_task(self._release(instance, body, context))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, instance: Instance, body: Body, context: RequestContext) -> None:
        with suppress(ProxyError, TimeoutError):  # the observers have the result
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                try:
                    await self._stages.release(instance, body, context)
                except UpstreamDied as error:
                    self._fatal.after(error, instance, context.watched)

    async def _ended(self) -> None:
        tasks = [*self._tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=RELEASE_TIMEOUT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
