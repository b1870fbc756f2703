"""One item's encoder output, made by an encode instance, or by the next where that fails."""

from epd.bodies.chat import encode_body, features
from epd.bodies.items import Body, MMItem
from epd.config import ProxyConfig
from epd.errors import NoInstance, ProxyError, UpstreamFailed, UpstreamTimeout
from epd.request.context import RequestContext
from epd.request.stages import Stages
from epd.routing.balance import Choice
from epd.routing.instances import Instance, Role
from epd.routing.retries import Retries, retry_delay_s
from epd.routing.table import InstanceTable
from epd.routing.use import Place
from epd.transfer.ec import ECTransfer
from epd.transfer.encoded import Encoded

TRIES = 3
"""How many encode instances an item is sent to at most."""


class Encodes:
    """Has items encoded."""

    def __init__(
        self, stages: Stages, table: InstanceTable, transfer: ECTransfer, config: ProxyConfig
    ) -> None:
        self._stages = stages
        self._table = table
        self._transfer = transfer
        self._config = config
        self._choice = Choice(table, lambda: config.encode_balance, Role.ENCODE)
        self._retries = Retries()

    async def made(
        self,
        body: Body,
        item: MMItem,
        uuid: str | None,
        context: RequestContext,
        consumer: Place | None = None,
    ) -> Encoded:
        """What an instance makes of an item.

        Args:
            body: the request.
            item: the item.
            uuid: its key; None: the engine makes one.
            context: the request's.
            consumer: whom it is for, with a transfer that pushes.

        Raises:
            ProxyError: none could, or one says that the item is at fault.
        """
        key = uuid or str(item.part.get(item.kind))
        tried: list[Instance] = []

        async def attempt() -> Encoded:
            instance = self._choice.best(tried, item=key, session=context.session)
            tried.append(instance)
            # Anew for each: what another one has begun to push may come yet.
            asked = self._transfer.encode_params(consumer, features(body, item))
            with self._table.using(instance):
                sent = encode_body(body, item, sent_as(item, uuid), asked)
                replied = await self._stages.encode(instance, sent, item, context)
                return self._transfer.encoded(replied, asked)

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


def sent_as(item: MMItem, uuid: str | None) -> str | None:
    """What engines are told to call an item; None: nothing."""
    return uuid if item.named else None
