"""Where the encoder outputs of a request's items come from: the store, or an encode instance."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from ec_store import EntryInfo
from epd.bodies.items import MM_KWARGS, Body, MMItem
from epd.cache.claims import Claims, Turn
from epd.cache.encoder_cache import EncoderCache, Look
from epd.config import ProxyConfig
from epd.errors import (
    NoInstance,
    ProxyError,
    UnknownMedia,
    UpstreamFailed,
    UpstreamTimeout,
    no_store,
)
from epd.flights import Flights
from epd.request.context import RequestContext
from epd.request.stages import Stages
from epd.routing.instances import Instance, InstanceTable, Role
from epd.routing.policies import Choice
from epd.routing.retries import Retries, is_instances_fault, retry_delay_s
from epd.spans import Span
from epd.transfer.encoded import Encoded, EncodedItem, from_entry

TRIES = 3
"""How many encode instances an item is sent to at most."""

AT_ONCE = 16
"""How many items of one request are encoded at once: connections are shared with all others, and
few fleets have more encode instances."""

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


class LookUp(NamedTuple):
    """What the store said of a request's items.

    Attributes:
        found: the items that it has.
        answered: whether it said anything.
        alone: whether nobody else is waited for, since what they make would be of no use.
    """

    found: Mapping[MMItem, Encoded]
    answered: bool
    alone: bool = False


class Encoder:
    """Gets each encoder output once, however many items, requests and proxies want it."""

    def __init__(
        self,
        stages: Stages,
        table: InstanceTable,
        cache: EncoderCache | None,
        config: ProxyConfig,
    ) -> None:
        self._stages = stages
        self._table = table
        self._cache = cache
        self._claims = None if cache is None else Claims(cache)
        self._config = config
        self._choice = Choice(table, config.encode_policy, Role.ENCODE)
        self._retries = Retries()
        self._flights: Flights[object, Made] = Flights()
        self._learned: OrderedDict[Wanted, str] = OrderedDict()

    async def encode(
        self,
        body: Body,
        uuids: Mapping[MMItem, str | None],
        context: RequestContext,
        *,
        anew: bool = False,
    ) -> list[EncodedItem]:
        """The encoder outputs of all items; those that are missing are encoded, `AT_ONCE`.

        Args:
            body: the request.
            uuids: its items and their keys.
            context: the request's.
            anew: whether what the store has is of no use, as a consumer could not load it.

        Raises:
            ProxyError: the first item that failed; the others are cancelled.
        """
        if not uuids:
            return []
        if not context.endpoint.encodes:
            return raw_items(uuids)
        record = context.record
        record.hits, record.waits = {}, 0
        wanted = self._identifiers(body, uuids, anew=anew)
        if self._claims is None or not wanted:
            looked = LookUp({}, answered=self._claims is not None, alone=anew)
            encoded = await self._each(body, uuids, looked, context)
        else:
            patient = not all(item.has_media for item in uuids)
            keys = list({*wanted.values()})
            with self._claims.look(body.get("model"), keys, patient=patient) as looking:
                with context.timed("store", "lookup"):
                    look = await looking.answer()
                looked = _answer(look, wanted, alone=anew)
                encoded = await self._each(body, uuids, looked, context)
        results = [one.result for one in encoded]
        record.items = {result: results.count(result) for result in results}
        if "hit" in record.items:
            record.hits = Counter([one.item.modality for one in encoded if one.result == "hit"])
        return encoded

    def _identifiers(
        self, body: Body, uuids: Mapping[MMItem, str | None], *, anew: bool
    ) -> Mapping[MMItem, str]:
        """What the store is asked for, by item."""
        return {
            item: identifier
            for item, uuid in uuids.items()
            if uuid is not None
            and (identifier := self._identifier(_wanted(body, item, uuid)))
            and not (anew and item.has_media)
        }

    async def _each(
        self,
        body: Body,
        uuids: Mapping[MMItem, str | None],
        looked: LookUp,
        context: RequestContext,
    ) -> list[EncodedItem]:
        """All items, once the store was asked."""
        context.record.at = "encode"

        async def one(item: MMItem) -> EncodedItem:
            return await self._one(body, item, uuids, looked, context)

        if len(uuids) == 1 or all(item in looked.found for item in uuids):
            return [await one(item) for item in uuids]
        return await _all(one, uuids)

    async def _one(
        self,
        body: Body,
        item: MMItem,
        uuids: Mapping[MMItem, str | None],
        looked: LookUp,
        context: RequestContext,
    ) -> EncodedItem:
        uuid = uuids[item]
        if item in looked.found:
            return EncodedItem(item, _sent(item, uuid), looked.found[item], "hit")
        if not item.has_media:
            raise _gone(item, looked)
        try:
            if uuid is None:
                encoded, mine = await self._somewhere(body, item, uuid, context), True
            else:
                encoded, mine = await self._once(
                    body, item, uuid, context, alone=looked.alone or not looked.answered
                )
        except ProxyError as error:
            if not self._may_be_local(uuids) or not is_instances_fault(error):
                raise error.at(item.param) from error.__cause__
            context.record.degraded.add("encode-local")
            return _local(item, uuid)
        context.record.waits += not mine
        return EncodedItem(item, _sent(item, uuid), encoded, "encoded" if mine else "hit")

    def _may_be_local(self, items: Iterable[MMItem]) -> bool:
        """Whether media may go on raw: not beside items that have none."""
        return self._config.on_encode_failure == "local" and all(item.has_media for item in items)

    async def _once(
        self, body: Body, item: MMItem, uuid: str, context: RequestContext, *, alone: bool
    ) -> tuple[Encoded, bool]:
        """The output, and whether it was encoded for this item.

        Args:
            body: the request.
            item: the item.
            uuid: its key.
            context: the request's.
            alone: whether other proxies are not asked.
        """
        wanted = _wanted(body, item, uuid)
        begun_here = False
        waiting: Span | None = None

        async def work() -> Made:
            nonlocal begun_here
            begun_here = True
            if waiting is not None:  # for one that failed
                waiting.end()
            identifier = self._identifier(wanted)
            if alone or self._claims is None or identifier is None:
                return await made()
            wait_s = self._config.encode_timeout_s
            with self._claims.turn(wanted.model, identifier, wait_s) as turn:
                found = await _come(turn, item, context)
                if found is not None and found.modality == item.modality:
                    return Made(from_entry(found), new=False)
                one = await made()
                turn.made = one.encoded.identifier is not None
                return one

        async def made() -> Made:
            encoded = await self._somewhere(body, item, uuid, context)
            self._learn(wanted, encoded)
            span = None if context.span is None else context.span.sent("encode", item)
            return Made(encoded, new=True, span=span)

        # Whose key the instances refuse, fails alone.
        flight = (wanted, context.headers.get("Authorization"), alone)
        if context.span is None or flight not in self._flights:
            one = await self._flights.try_join(flight, work)
        else:
            with context.span.child(WAIT, item=item) as waiting:
                one = await self._flights.try_join(flight, work)
                if one.span is not None:
                    waiting.link(one.span)
        return one.encoded, one.new and begun_here

    async def _somewhere(
        self, body: Body, item: MMItem, uuid: str | None, context: RequestContext
    ) -> Encoded:
        """Encode an item on one instance, or on the next where that fails.

        Raises:
            ProxyError: none could, or one says that the item is at fault.
        """
        key = uuid or str(item.part.get(item.kind))
        tried: list[Instance] = []

        async def attempt() -> Encoded:
            self._choice.use(self._config.encode_policy)
            instance = self._choice.best(key, tried)
            tried.append(instance)
            with self._table.using(instance):
                return await self._stages.encode(instance, body, item, _sent(item, uuid), context)

        def again(error: ProxyError) -> float | None:
            others = self._choice.others(tried)
            return retry_delay_s(error, others=others, patience_s=self._config.encode_timeout_s)

        try:
            return await self._retries.run(attempt, tries=TRIES, again=again)
        except (UpstreamFailed, UpstreamTimeout) as error:
            if self._table.serves(Role.ENCODE):
                raise
            raise NoInstance(
                "no encode instance can be reached", slug="no_encoder", stage="encode"
            ) from error

    def _identifier(self, wanted: Wanted) -> str | None:
        """The key of an output in the store; None where only an engine can tell it."""
        known = self._learned.get(wanted)
        if known is not None:
            self._learned.move_to_end(wanted)
            return known
        return wanted.uuid if wanted.named and not wanted.kwargs else None

    def _learn(self, wanted: Wanted, encoded: Encoded) -> None:
        if self._cache is not None and encoded.namespace is not None:
            self._cache.learn(wanted.model, encoded.namespace)
        if encoded.identifier is not None and encoded.identifier != self._identifier(wanted):
            self._learned[wanted] = encoded.identifier
            while len(self._learned) > MAX_LEARNED:
                self._learned.popitem(last=False)


async def _all(
    one: Callable[[MMItem], Coroutine[Any, Any, EncodedItem]], items: Iterable[MMItem]
) -> list[EncodedItem]:
    """Those of all items, `AT_ONCE`; the first that fails ends the others."""
    places = asyncio.Semaphore(AT_ONCE)

    async def in_place(item: MMItem) -> EncodedItem:
        async with places:
            return await one(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(in_place(item)) for item in items]
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def _come(turn: Turn, item: MMItem, context: RequestContext) -> EntryInfo | None:
    """Wait for an item's turn."""
    if context.span is None or turn.first:
        return await turn.come()
    with context.span.child(WAIT, item=item):
        return await turn.come()


def _answer(look: Look | None, identifiers: Mapping[MMItem, str], *, alone: bool) -> LookUp:
    if look is None:
        return LookUp({}, answered=False)
    infos = {key.identifier: info for key, info in (look.found or {}).items()}
    found = {
        item: from_entry(infos[identifier])
        for item, identifier in identifiers.items()
        if identifier in infos and infos[identifier].modality == item.modality
    }
    return LookUp(found, answered=True, alone=alone)


def _gone(item: MMItem, looked: LookUp) -> ProxyError:
    if not looked.answered:
        return no_store("the encoder cache gives no answer")
    return UnknownMedia("no media are known under this uuid: send them once more", param=item.param)


def _wanted(body: Body, item: MMItem, uuid: str) -> Wanted:
    kwargs = {name: body[name] for name in MM_KWARGS if body.get(name)}
    encoded = orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS) if kwargs else b""
    model = body.get("model")
    return Wanted(model if isinstance(model, str) else None, uuid, item.named, encoded)


def raw_items(uuids: Mapping[MMItem, str | None]) -> list[EncodedItem]:
    """Items that all go on as they are."""
    return [_local(item, uuid) for item, uuid in uuids.items()]


def _local(item: MMItem, uuid: str | None) -> EncodedItem:
    """An item that prefill or decode encodes."""
    return EncodedItem(item, _sent(item, uuid), Encoded(), "local")


def _sent(item: MMItem, uuid: str | None) -> str | None:
    """What engines are told to call an item."""
    return uuid if item.named else None
