"""Each encoder output once, however many items, requests and proxies want it."""

from collections import OrderedDict
from contextlib import ExitStack
from typing import NamedTuple

import orjson

from ec_store import EntryInfo
from epd.bodies.items import MM_KWARGS, Body, MMItem
from epd.cache.claims import Claims, Turn
from epd.cache.encoder_cache import EncoderCache
from epd.config import ProxyConfig
from epd.flights import Flights
from epd.request.context import RequestContext
from epd.request.encodes import Encodes
from epd.spans import Span
from epd.transfer.encoded import Encoded, from_entry

MAX_LEARNED = 65536
"""How many identifiers are remembered that an engine made of a uuid and something else."""

WAIT = "encode wait"
"""The span of an item that somebody else encodes."""


class Wanted(NamedTuple):
    """An encoder output, as far as it is known before an engine has made it.

    Attributes:
        model: the model's served name.
        uuid: the item's key.
        named: whether the item is sent under it; else engines name it by a hash of their own.
        kwargs: what else its content depends on.
    """

    model: str | None
    uuid: str
    named: bool
    kwargs: bytes


class Made(NamedTuple):
    """An encoder output that one request has got for all that wanted it.

    Attributes:
        encoded: the output.
        new: whether an encode instance made it just now.
        span: of the request to that instance, where it is traced.
    """

    encoded: Encoded
    new: bool
    span: Span | None = None


class Once:
    """Has what several want at a time made for one of them.

    Attributes:
        claims: what proxies tell each other by; None: there is no store.
    """

    def __init__(self, encodes: Encodes, cache: EncoderCache | None, config: ProxyConfig) -> None:
        self.claims = None if cache is None else Claims(cache)
        self._encodes = encodes
        self._cache = cache
        self._config = config
        self._flights: Flights[object, Made] = Flights()
        self._learned: OrderedDict[Wanted, str] = OrderedDict()

    async def made(  # noqa: PLR0913 - what is encoded, and for which instance
        self,
        body: Body,
        item: MMItem,
        uuid: str,
        context: RequestContext,
        *,
        alone: bool,
        namespace: str | None = None,
    ) -> tuple[Encoded, bool]:
        """The output, and whether it was encoded for this item.

        Args:
            body: the request.
            item: the item.
            uuid: its key.
            context: the request's.
            alone: whether other proxies are not asked.
            namespace: the consumer's, where it is known.
        """
        wanted = wanted_of(body, item, uuid)
        begun_here = False
        waiting: Span | None = None

        async def work() -> Made:
            nonlocal begun_here
            begun_here = True
            if waiting is not None:  # for one that failed
                waiting.end()
            identifier = self.identifier(wanted)
            with ExitStack() as holding:
                turn: Turn | None = None
                if not alone and self.claims is not None and identifier is not None:
                    wait_s = self._config.encode_timeout_s
                    turn = self.claims.turn(wanted.model, identifier, wait_s, namespace)
                    found = await _come(holding.enter_context(turn), item, context)
                    if found is not None and found.modality == item.modality:
                        return Made(from_entry(found), new=False)
                encoded = await self._encodes.made(body, item, uuid, context, namespace=namespace)
                if turn is not None:
                    turn.made = encoded.identifier is not None
            self._learn(wanted, encoded)
            span = None if context.span is None else context.span.sent("encode", item)
            return Made(encoded, new=True, span=span)

        # Only requests with the same Authorization share a flight: a 401 must not fail the others.
        flight = (wanted, namespace, context.headers.get("Authorization"), alone)
        if context.span is None or flight not in self._flights:
            one = await self._flights.try_join(flight, work)
        else:
            with context.span.child(WAIT, item=item) as waiting:
                one = await self._flights.try_join(flight, work)
                if one.span is not None:
                    waiting.link(one.span)
        return one.encoded, one.new and begun_here

    def identifier(self, wanted: Wanted) -> str | None:
        """The key of an output in the store; None where only an engine can tell it."""
        known = self._learned.get(wanted)
        if known is not None:
            self._learned.move_to_end(wanted)
            return known
        return wanted.uuid if wanted.named and not wanted.kwargs else None

    def _learn(self, wanted: Wanted, encoded: Encoded) -> None:
        if self._cache is not None and encoded.namespace is not None:
            self._cache.learn(wanted.model, encoded.namespace)
        if encoded.identifier is not None and encoded.identifier != self.identifier(wanted):
            self._learned[wanted] = encoded.identifier
            while len(self._learned) > MAX_LEARNED:
                self._learned.popitem(last=False)


def wanted_of(body: Body, item: MMItem, uuid: str) -> Wanted:
    """The output of an item with this key."""
    kwargs = {name: body[name] for name in MM_KWARGS if body.get(name)}
    encoded = orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS) if kwargs else b""
    model = body.get("model")
    return Wanted(model if isinstance(model, str) else None, uuid, item.named, encoded)


async def _come(turn: Turn, item: MMItem, context: RequestContext) -> EntryInfo | None:
    """Wait for an item's turn."""
    if context.span is None or turn.first:
        return await turn.come()
    with context.span.child(WAIT, item=item):
        return await turn.come()
