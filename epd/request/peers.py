"""What is known of prefill instances' KV connectors, where a transfer has to know it beforehand."""

import orjson

from epd.config import ProxyConfig
from epd.errors import UpstreamFailed
from epd.flights import Flights
from epd.http.upstream import Upstream
from epd.routing.instances import Instance
from epd.transfer.kv import KVTransfer
from epd.transfer.params import Params


class Peers:
    """Asked for once, or learnt from replies, and forgotten when something fails."""

    def __init__(self, transfer: KVTransfer, upstream: Upstream, config: ProxyConfig) -> None:
        self._transfer = transfer
        self._upstream = upstream
        self._config = config
        self._known: dict[Instance, Params] = {}
        self._flights: Flights[Instance, Params] = Flights()

    async def of(self, instance: Instance) -> Params | None:
        """What is known of an instance's connector; None: nothing, and nobody can be asked.

        Raises:
            ProxyError: its connector did not say it.
        """
        known = self._known.get(instance)
        if known is not None or (url := self._transfer.peer_url(instance)) is None:
            return known

        async def ask() -> Params:
            answer = await self._upstream.fetch(
                url, stage="prefill", headers={}, timeout_s=self._config.health_timeout_s
            )
            try:
                said = orjson.loads(answer.body) if answer.ok else None
            except orjson.JSONDecodeError:
                said = None
            if said is None:
                raise UpstreamFailed(
                    "the prefill instance's KV connector does not say who it is",
                    slug="prefill_no_peer",
                    stage="prefill",
                )
            peer = self._known[instance] = self._transfer.peer(said)
            return peer

        return await self._flights.join(instance, ask)

    def learn(self, instance: Instance, replied: Params) -> None:
        """Remember what a reply of a prefill instance tells."""
        if (learned := self._transfer.learned(replied)) is not None:
            self._known[instance] = learned

    def forget(self, instance: Instance) -> None:
        """Ask, or learn, anew: it may have been replaced."""
        self._known.pop(instance, None)
