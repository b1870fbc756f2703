"""Where the encoder outputs of a request's items come from: the store, or an encode instance."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple

from epd.bodies.items import Body, MMItem
from epd.cache.encoder_cache import EncoderCache
from epd.cache.look import Look
from epd.config import ProxyConfig
from epd.errors import (
    ProxyError,
    UnknownMedia,
    no_store,
)
from epd.request.context import RequestContext
from epd.request.encodes import Encodes, sent_as
from epd.request.once import Once, wanted_of
from epd.request.stages import Stages
from epd.routing.fatal import FatalRequests
from epd.routing.namespaces import Namespaces
from epd.routing.table import InstanceTable
from epd.routing.use import Place
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import Encoded, EncodedItem, from_entry

AT_ONCE = 16
"""How many items of one request are encoded at once: connections are shared with all others, and
few fleets have more encode instances."""


class LookUp(NamedTuple):
    """What the store said of a request's items.

    Attributes:
        found: the items that it has.
        answered: whether it said anything.
        alone: whether nobody else is waited for, since what they make would be of no use.
        namespace: the consumer's, where it is known.
    """

    found: Mapping[MMItem, Encoded]
    answered: bool
    alone: bool = False
    namespace: str | None = None


class Encoder:
    """Gets the encoder outputs of requests."""

    def __init__(  # noqa: PLR0913, PLR0917 - what an item meets on its way
        self,
        stages: Stages,
        namespaces: Namespaces,
        table: InstanceTable,
        cache: EncoderCache | None,
        transfer: ECTransfer,
        fatal: FatalRequests,
        config: ProxyConfig,
    ) -> None:
        self._transfer = transfer
        self._config = config
        self._encodes = Encodes(stages, namespaces, table, transfer, fatal, config)
        self._once = Once(self._encodes, cache, config)

    async def encode(  # noqa: PLR0913 - what is encoded, and for which instance
        self,
        body: Body,
        uuids: Mapping[MMItem, str | None],
        context: RequestContext,
        consumer: Place | None = None,
        *,
        namespace: str | None = None,
        anew: bool = False,
    ) -> list[EncodedItem]:
        """The encoder outputs of all items; those that are missing are encoded, `AT_ONCE`.

        Args:
            body: the request.
            uuids: its items and their keys.
            context: the request's.
            consumer: whom they are for, with a transfer that pushes; None: nobody who takes any.
            namespace: the consumer's, where it is known.
            anew: whether what the store has is of no use, as a consumer could not load it.

        Raises:
            ProxyError: the first item that failed; the others are cancelled.
        """
        if not uuids:
            return []
        pushed = self._transfer.pushed
        if not context.endpoint.encodes or (pushed and consumer is None):
            return raw_items(uuids)
        if pushed and consumer is not None:
            return await self._pushed(body, uuids, context, consumer)
        record = context.record
        record.hits, record.waits = {}, 0
        wanted = self._identifiers(body, uuids, anew=anew)
        if self._once.claims is None or not wanted:
            answered = self._once.claims is not None
            looked = LookUp({}, answered=answered, alone=anew, namespace=namespace)
            encoded = await self._each(body, uuids, looked, context)
        else:
            patient = not all(item.has_media for item in uuids)
            keys = list({*wanted.values()})
            looking = self._once.claims.look(
                body.get("model"), keys, patient=patient, namespace=namespace
            )
            with looking:
                with context.timed("store", "lookup"):
                    look = await looking.answer()
                looked = _answer(look, wanted, alone=anew)._replace(namespace=namespace)
                encoded = await self._each(body, uuids, looked, context)
        results = [one.result for one in encoded]
        record.items = {result: results.count(result) for result in results}
        if "hit" in record.items:
            record.hits = Counter([one.item.modality for one in encoded if one.result == "hit"])
        return encoded

    async def _pushed(
        self,
        body: Body,
        uuids: Mapping[MMItem, str | None],
        context: RequestContext,
        consumer: Place,
    ) -> list[EncodedItem]:
        """All items, pushed to one consumer, which waits for each: nothing is shared, nor local."""

        async def one(item: MMItem) -> EncodedItem:
            uuid = uuids[item]
            if not item.has_media:
                raise _gone(item, LookUp({}, answered=False))
            try:
                encoded = await self._encodes.made(body, item, uuid, context, consumer)
            except ProxyError as error:
                raise error.at(item.param) from error.__cause__
            return EncodedItem(item, sent_as(item, uuid), encoded, "encoded")

        encoded = await _all(one, uuids)
        context.record.items = {"encoded": len(encoded)}
        return encoded

    def _identifiers(
        self, body: Body, uuids: Mapping[MMItem, str | None], *, anew: bool
    ) -> Mapping[MMItem, str]:
        """What the store is asked for, by item."""
        return {
            item: identifier
            for item, uuid in uuids.items()
            if uuid is not None
            and (identifier := self._once.identifier(wanted_of(body, item, uuid)))
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
        if len(uuids) == 1 or all(item in looked.found for item in uuids):
            return [await self._one(item, body, uuids, looked, context) for item in uuids]
        return await _all(lambda item: self._one(item, body, uuids, looked, context), uuids)

    async def _one(
        self,
        item: MMItem,
        body: Body,
        uuids: Mapping[MMItem, str | None],
        looked: LookUp,
        context: RequestContext,
    ) -> EncodedItem:
        uuid = uuids[item]
        if item in looked.found:
            return EncodedItem(item, sent_as(item, uuid), looked.found[item], "hit")
        if not item.has_media:
            raise _gone(item, looked)
        try:
            if uuid is None:
                encoded, mine = (
                    await self._encodes.made(body, item, uuid, context, namespace=looked.namespace),
                    True,
                )
            else:
                encoded, mine = await self._once.made(
                    body,
                    item,
                    uuid,
                    context,
                    alone=looked.alone or not looked.answered,
                    namespace=looked.namespace,
                )
        except ProxyError as error:
            possible = self._may_be_local(uuids) and not context.watched.spent
            if not possible or not error.retryable:
                raise error.at(item.param) from error.__cause__
            context.record.degraded.add("encode-local")
            return _local(item, uuid)
        context.record.waits += not mine
        return EncodedItem(item, sent_as(item, uuid), encoded, "encoded" if mine else "hit")

    def _may_be_local(self, items: Iterable[MMItem]) -> bool:
        """Whether media may go on raw: not beside items that have none."""
        return self._config.on_encode_failure == "local" and all(item.has_media for item in items)


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


def raw_items(uuids: Mapping[MMItem, str | None]) -> list[EncodedItem]:
    """Items that all go on as they are."""
    return [_local(item, uuid) for item, uuid in uuids.items()]


def _local(item: MMItem, uuid: str | None) -> EncodedItem:
    """An item that prefill or decode encodes."""
    return EncodedItem(item, sent_as(item, uuid), Encoded(), "local")
