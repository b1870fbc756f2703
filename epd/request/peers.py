"""What is known of prefill instances' KV connectors, where a transfer has to know it beforehand."""

import asyncio
from typing import NamedTuple

import orjson

from epd.config.live import LiveConfig
from epd.errors import ProxyError
from epd.flights import Flights
from epd.routing.instances import Instance
from epd.routing.table import InstanceTable
from epd.transfer.kv import KVTransfer, Pair
from epd.transfer.params import Params
from epd.upstream.client import Upstream

KNOWN_S = 10.0
"""How long it holds: no instance is replaced by another that is ready within it."""

Member = tuple[Instance, int | None]
"""A prefill instance, and its data-parallel rank where the proxy names one."""


class _Known(NamedTuple):
    peer: Params
    until_s: float


class Peers:
    """Asked for again and again, or learnt from replies, and forgotten when something fails."""

    def __init__(
        self, table: InstanceTable, transfer: KVTransfer, upstream: Upstream, live: LiveConfig
    ) -> None:
        self._table = table
        self._transfer = transfer
        self._upstream = upstream
        self._live = live
        self._known: dict[Member, _Known] = {}
        self._flights: Flights[Member, Params] = Flights()
        self._clock = asyncio.get_running_loop().time

    async def of(self, pair: Pair) -> Params | None:
        """What is known of a prefill's connector; None: nothing, and nobody can be asked.

        An instance whose connector does not say it is judged by that; one that does is not.

        Raises:
            ProxyError: its connector did not say it.
        """
        known = self._known.get(member := _member(pair))
        if known is not None and self._clock() < known.until_s:
            return known.peer
        url = self._transfer.peer_url(pair.prefill)
        if url is None:
            return None
        return await self._flights.join(member, lambda: self._ask(member, url))

    def learn(self, pair: Pair, replied: Params) -> None:
        """Remember what a prefill's reply tells."""
        if (learned := self._transfer.learned(pair, replied)) is not None:
            self._remember(_member(pair), learned)

    def forget(self, instance: Instance) -> None:
        """Ask, or learn, anew of all its ranks: it may have been replaced."""
        self._known = {one: known for one, known in self._known.items() if one[0] != instance}

    async def _ask(self, member: Member, url: str) -> Params:
        try:
            answer = await self._upstream.fetch(
                url, stage="prefill", headers={}, timeout_s=self._live.current.health_timeout_s
            )
            peer = self._transfer.peer(_parsed(answer.body) if answer.ok else None)
        except ProxyError:
            # That it answers would say nothing of its engine, and forgive what that has failed.
            with self._table.using(member[0]):
                raise
        self._remember(member, peer)
        return peer

    def _remember(self, member: Member, peer: Params) -> None:
        now_s = self._clock()
        if member not in self._known:  # those that left are not asked for any more
            self._known = {
                one: known for one, known in self._known.items() if now_s < known.until_s
            }
        self._known[member] = _Known(peer, now_s + KNOWN_S)


def _parsed(said: bytes) -> object:
    try:
        return orjson.loads(said)
    except orjson.JSONDecodeError:
        return None


def _member(pair: Pair) -> Member:
    return pair.prefill, pair.prefill_rank
