"""One request: its route, then encode, prefill where there is one, decode."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from epd.cache import EncoderCache
from epd.chat import Body, MMItem, check_mm_kwargs, mm_items, names_entries
from epd.config import ProxyConfig
from epd.encoding import Encoder
from epd.errors import BadRequest, ProxyError
from epd.fetch import RemoteMedia
from epd.instances import Instance, InstanceTable, Role
from epd.keys import Keys
from epd.stages import RequestContext, Stages
from epd.transfer import EncodedItem, consumer_body
from epd.upstream import Reply, Upstream


@dataclass(frozen=True, slots=True)
class Route:
    """The instances that answer one attempt.

    Attributes:
        prefill: None in E+PD.
        decode: the one that answers.
    """

    prefill: Instance | None
    decode: Instance


class Pipeline:
    """Carries requests through the stages."""

    def __init__(
        self,
        table: InstanceTable,
        upstream: Upstream,
        media: RemoteMedia,
        cache: EncoderCache | None,
        config: ProxyConfig,
    ) -> None:
        self._table = table
        self._media = media
        self._stages = Stages(upstream, config)
        self._encoder = Encoder(self._stages, table, cache, config)
        self._keys = Keys(cache, config)
        self._config = config

    @asynccontextmanager
    async def run(self, body: Body, context: RequestContext) -> AsyncIterator[Reply]:
        """The decode instance's answer, its head read, its status 2xx.

        Leaving the context, by cancellation too, closes whatever is open upstream.

        Raises:
            BadRequest: the request cannot be served as it is.
            ProxyError: a stage failed.
        """
        body, uuids = await self._keyed(body, context)
        async with AsyncExitStack() as stack:
            yield await self._opened(stack, body, uuids, context)

    async def encode(self, body: Body, context: RequestContext) -> list[EncodedItem]:
        """Have the items of a request encoded that asks for nothing else, and remember them.

        Raises:
            BadRequest: an item cannot be encoded as it is.
            ProxyError: the first item that failed.
        """
        body, uuids = await self._keyed(body, context)
        encoded = await self._encoder.encode(body, uuids, context)
        await self._keys.remember(body, encoded, context.tenant)
        return encoded

    async def forget(self, uuid: str, model: str | None, context: RequestContext) -> None:
        """Forget what a client calls so: see `Keys.forget`."""
        await self._keys.forget(uuid, model, context.tenant)

    async def _keyed(
        self, body: Body, context: RequestContext
    ) -> tuple[Body, Mapping[MMItem, str | None]]:
        """The request, with media in it that the proxy fetches, and the keys of its items."""
        if not self._config.trust_request_mm_kwargs:
            check_mm_kwargs(body)
        items = mm_items(body)
        if len(items) > self._config.max_items:
            raise BadRequest(
                f"{len(items)} media items, and at most {self._config.max_items} are allowed",
                slug="too_many_items",
                param="messages",
            )
        body = await self._media.inlined(body, items, context.tenant.name)
        return body, await self._keys.of(body, mm_items(body), context.tenant)

    async def _opened(
        self,
        stack: AsyncExitStack,
        body: Body,
        uuids: Mapping[MMItem, str | None],
        context: RequestContext,
    ) -> Reply:
        """The answer; where an entry may have been lost on the way, that of a second attempt."""
        encoded = await self._encoder.encode(body, uuids, context)
        # Before the answer: who has it may use the name.
        named = [one for one in encoded if one.item.uuid is not None]
        await self._keys.remember(body, named, context.tenant)
        sent = consumer_body(body, encoded, raw=self._config.decode_media == "raw")
        try:
            return await stack.enter_async_context(self._answered(sent, context))
        except ProxyError as error:
            # An engine that cannot load what it was named fails the request and says no more than
            # that. All is encoded again, and the media go along: nothing can be missing.
            if error.answered != HTTPStatus.INTERNAL_SERVER_ERROR or not names_entries(sent):
                raise
        context.retries += 1
        encoded = await self._encoder.encode(body, uuids, context, anew=True)
        sent = consumer_body(body, encoded, raw=True)
        return await stack.enter_async_context(self._answered(sent, context))

    @asynccontextmanager
    async def _answered(self, body: Body, context: RequestContext) -> AsyncIterator[Reply]:
        route = self._route()
        if route.prefill is not None:
            params = await self._stages.prefill(route.prefill, body, context)
            body = {**body, "kv_transfer_params": params}
        async with self._stages.decode(route.decode, body, context) as reply:
            yield reply

    def _route(self) -> Route:
        prefill = self._table.of(Role.PREFILL)
        return Route(
            prefill=self._table.pick(Role.PREFILL) if prefill else None,
            decode=self._table.pick(Role.DECODE if prefill else Role.PREFILL_DECODE),
        )
