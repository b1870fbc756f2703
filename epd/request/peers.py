"""What is known of prefill instances' KV connectors, where a transfer has to know it beforehand."""

import asyncio
from typing import NamedTuple

import orjson

from epd.config import ProxyConfig
from epd.errors import ProxyError
from epd.flights import Flights
from epd.http.upstream import Upstream
from epd.routing.instances import Instance
from epd.routing.table import InstanceTable
from epd.transfer.kv import KVTransfer
from epd.transfer.params import Params

KNOWN_S = 10.0
"""How long it holds: no instance is replaced by another that is ready within it."""


class _Known(NamedTuple):
    peer: Params
    until_s: float


class Peers:
    """Asked for again and again, or learnt from replies, and forgotten when something fails."""

    def __init__(
        self, table: InstanceTable, transfer: KVTransfer, upstream: Upstream, config: ProxyConfig
    ) -> None:
        self._table = table
        self._transfer = transfer
        self._upstream = upstream
        self._config = config
        self._known: dict[Instance, _Known] = {}
        self._flights: Flights[Instance, Params] = Flights()
        self._clock = asyncio.get_running_loop().time

    async def of(self, instance: Instance) -> Params | None:
        """What is known of an instance's connector; None: nothing, and nobody can be asked.

        An instance whose connector does not say it is judged by that; one that does is not.

        Raises:
            ProxyError: its connector did not say it.
        """
        known = self._known.get(instance)
        if known is not None and self._clock() < known.until_s:
            return known.peer
        url = self._transfer.peer_url(instance)
        if url is None:
            return None
        return await self._flights.join(instance, lambda: self._ask(instance, url))

    def learn(self, instance: Instance, replied: Params) -> None:
        """Remember what a reply of a prefill instance tells."""
        if (learned := self._transfer.learned(replied)) is not None:
            self._remember(instance, learned)

    def forget(self, instance: Instance) -> None:
        """Ask, or learn, anew: it may have been replaced."""
        self._known.pop(instance, None)

    async def _ask(self, instance: Instance, url: str) -> Params:
        try:
            answer = await self._upstream.fetch(
                url, stage="prefill", headers={}, timeout_s=self._config.health_timeout_s
            )
            peer = self._transfer.peer(_parsed(answer.body) if answer.ok else None)
        except ProxyError:
            # That it answers would say nothing of its engine, and forgive what that has failed.
            with self._table.using(instance):
                raise
        self._remember(instance, peer)
        return peer

    def _remember(self, instance: Instance, peer: Params) -> None:
        now_s = self._clock()
        if instance not in self._known:  # those that left are not asked for any more
            self._known = {
                one: known for one, known in self._known.items() if now_s < known.until_s
            }
        self._known[instance] = _Known(peer, now_s + KNOWN_S)


def _parsed(said: bytes) -> object:
    try:
        return orjson.loads(said)
    except orjson.JSONDecodeError:
        return None
