"""One item's encoder output, made by an encode instance, or by the next where that fails."""

import asyncio
from functools import partial

from epd.bodies.chat import encode_body, features
from epd.bodies.items import Body, MMItem
from epd.config import ProxyConfig
from epd.errors import (
    NoInstance,
    ProxyError,
    UpstreamDied,
    UpstreamFailed,
    UpstreamTimeout,
)
from epd.request.context import RequestContext
from epd.request.recovery import MAX_ENCODES, EncodeFailure, encode_delay_s
from epd.request.stages import Stages
from epd.routing.balance import Choice
from epd.routing.fatal import FatalRequests
from epd.routing.instances import Instance, Role
from epd.routing.namespaces import Namespaces
from epd.routing.retries import Retries
from epd.routing.table import InstanceTable
from epd.routing.use import Place
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import Encoded


class Encodes:
    """Has items encoded."""

    def __init__(  # noqa: PLR0913, PLR0917 - what an encode needs
        self,
        stages: Stages,
        namespaces: Namespaces,
        table: InstanceTable,
        transfer: ECTransfer,
        fatal: FatalRequests,
        config: ProxyConfig,
    ) -> None:
        self._stages = stages
        self._namespaces = namespaces
        self._table = table
        self._fatal = fatal
        self._transfer = transfer
        self._config = config
        self._choice = Choice(table, lambda: config.encode_balance, Role.ENCODE)
        self._retries = Retries()

    async def made(  # noqa: PLR0913 - what is encoded, and for which instance
        self,
        body: Body,
        item: MMItem,
        uuid: str | None,
        context: RequestContext,
        consumer: Place | None = None,
        *,
        namespace: str | None = None,
    ) -> Encoded:
        """What an instance makes of an item.

        Args:
            body: the request.
            item: the item.
            uuid: its key; None: the engine makes one.
            context: the request's.
            consumer: whom it is for, with a transfer that pushes.
            namespace: the consumer's, where it is known. Instances with another one are not asked.

        Returns:
            Nothing of the output where the instance says that it keeps it under another namespace:
            its consumer would not find it.

        Raises:
            ProxyError: none could, or one says that the item is at fault.
        """
        fits = None if namespace is None else partial(self._shares, namespace)
        key, watched = item_key(item, uuid), context.watched
        clock = asyncio.get_running_loop().time
        tried: list[Instance] = []
        started_s = clock()
        try:
            with self._retries.tries(MAX_ENCODES) as tries:
                while True:
                    try:
                        self._fatal.check(watched, [key])
                        session = context.session
                        instance = self._choice.best(tried, item=key, session=session, fits=fits)
                        tried.append(instance)
                        made = await self._made_by(instance, body, item, uuid, context, consumer)
                        return (
                            made if namespace in {None, made.namespace or namespace} else Encoded()
                        )
                    except ProxyError as error:
                        others = self._choice.others(tried, fits)
                        elapsed_s = clock() - started_s
                        failure = self._failure(error, len(tried), elapsed_s, others=others)
                        delay_s = None if watched.spent else encode_delay_s(failure)
                        if delay_s is None:
                            raise
                        await tries.another(error, delay_s)
        except (UpstreamFailed, UpstreamTimeout) as error:
            if self._table.serves(Role.ENCODE):
                raise
            raise NoInstance(
                "no encode instance can be reached", slug="no_encoder", stage="encode"
            ) from error

    def _failure(
        self, error: ProxyError, tries: int, elapsed_s: float, *, others: bool
    ) -> EncodeFailure:
        local = self._config.on_encode_failure == "local"
        patience_s = self._config.encode_timeout_s
        return EncodeFailure(error, tries, elapsed_s, others, local, patience_s)

    async def _made_by(  # noqa: PLR0913, PLR0917 - what is sent, for whom, and where
        self,
        instance: Instance,
        body: Body,
        item: MMItem,
        uuid: str | None,
        context: RequestContext,
        consumer: Place | None,
    ) -> Encoded:
        """Return what one instance makes of an item. See `made`."""
        key, watched = item_key(item, uuid), context.watched
        # Anew for each: what another one has begun to push may come yet.
        asked = self._transfer.encode_params(consumer, features(body, item))
        try:
            with self._table.using(instance):
                sent = encode_body(body, item, sent_as(item, uuid), asked)
                replied = await self._stages.encode(instance, sent, item, context)
                encoded = self._transfer.encoded(replied, asked)
        except UpstreamDied as error:
            raise self._fatal.after(error, instance, watched, [key]) from error.__cause__
        self._fatal.survived(watched, [key], body=False)
        if encoded.namespace is not None:
            self._namespaces.told(instance, encoded.namespace)
        return encoded

    def _shares(self, namespace: str, instance: Instance) -> bool:
        return self._namespaces.shares(instance, namespace)


def item_key(item: MMItem, uuid: str | None) -> str:
    """Return what an item is known by: its key, or its URL where an engine makes the key."""
    return uuid or str(item.part.get(item.kind))


def sent_as(item: MMItem, uuid: str | None) -> str | None:
    """What engines are told to call an item; None: nothing."""
    return uuid if item.named else None
