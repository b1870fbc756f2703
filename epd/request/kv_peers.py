"""Facts about the KV connectors of prefill instances, which some transfers need in advance."""

import time
from dataclasses import dataclass, field

from epd.aio import Flights
from epd.config.sections.limits import LimitSettings
from epd.errors import Outcome, ProxyError
from epd.json_or_none import json_or_none
from epd.routing.instances import Instance
from epd.routing.table import InstanceTable
from epd.transfer import Params
from epd.transfer.kv import KVTransfer, Prefilled
from epd.upstream import Upstream

FACTS_TTL_S = 10.0
"""Lifetime of a fact, in seconds. No replacement of an instance becomes ready faster."""

Member = tuple[Instance, int | None]
"""Prefill instance, and its data-parallel rank if the proxy names one."""


@dataclass(slots=True, eq=False)
class PeerRegistry:
    """KV connector facts of instances, kept for `_ttl_s` and dropped after a failure.

    They are queried, or learned from replies. Belongs to one event loop.
    """

    _table: InstanceTable
    _transfer: KVTransfer
    _upstream: Upstream
    _config: LimitSettings
    _ttl_s: float = FACTS_TTL_S
    _facts: dict[Member, tuple[Params, float]] = field(default_factory=dict)
    _flights: Flights[Member, Params] = field(default_factory=Flights)

    async def params_for(self, prefill: Instance, rank: int | None) -> Params | None:
        """Return the facts of a prefill's connector; None if there are none and no URL to query.

        A failed query counts as a failure of the instance. A successful one has no effect on
        health.

        Raises:
            ProxyError: the connector did not answer the query.
        """
        member = prefill, rank
        facts, until_s = self._facts.get(member, (None, 0.0))
        if time.monotonic() < until_s:
            return facts
        if (url := self._transfer.peer_url(prefill)) is None:
            return None
        return await self._flights.join(member, lambda: self._ask(member, url))

    def learn_facts(self, prefilled: Prefilled) -> None:
        """Keep the facts in a prefill's reply."""
        handover = prefilled.handover
        if (facts := self._transfer.facts_of_reply(handover, prefilled.reply)) is not None:
            self._remember((handover.prefill, handover.prefill_rank), facts)

    def forget_instance(self, instance: Instance) -> None:
        """Drop the facts of all ranks of an instance, which may have been replaced."""
        self._facts = {rank: facts for rank, facts in self._facts.items() if rank[0] != instance}

    async def _ask(self, member: Member, url: str) -> Params:
        try:
            answer = await self._upstream.fetch(
                url, stage="prefill", headers={}, timeout_s=self._config.health_timeout_s
            )
            peer = self._transfer.parse_peer(json_or_none(answer.body) if answer.ok else None)
        except ProxyError as error:
            if error.outcome is Outcome.REFUSED:  # it is not the port of the instance's requests
                error.outcome = Outcome.UNREACHABLE
            # A success would only show that the port answers, and reset the engine's failures.
            with self._table.track_request(member[0]):
                raise
        self._remember(member, peer)
        return peer

    def _remember(self, member: Member, peer: Params) -> None:
        now_s = time.monotonic()
        if member not in self._facts:  # drop expired entries of instances that left
            self._facts = {rank: facts for rank, facts in self._facts.items() if now_s < facts[1]}
        self._facts[member] = peer, now_s + self._ttl_s
