"""One request: its route, then encode, prefill where there is one, decode."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from epd.cache import EncoderCache
from epd.chat import Body, MMItem, mm_items, names_entries
from epd.config import ProxyConfig
from epd.encoding import Encoder
from epd.errors import BadRequest, ProxyError
from epd.fetch import RemoteMedia
from epd.identity import content_key
from epd.instances import Instance, InstanceTable, Role
from epd.media import Inline, source
from epd.stages import RequestContext, Stages
from epd.tenants import Scope
from epd.transfer import consumer_body
from epd.upstream import Reply, Upstream

HASH_IN_THREAD_BYTES = 1024**2
"""Media above this size are hashed off the event loop."""


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
        self._config = config

    @asynccontextmanager
    async def run(self, body: Body, context: RequestContext) -> AsyncIterator[Reply]:
        """The decode instance's answer, its head read, its status 2xx.

        Leaving the context, by cancellation too, closes whatever is open upstream.

        Raises:
            BadRequest: the request cannot be served as it is.
            ProxyError: a stage failed.
        """
        items = mm_items(body)
        if len(items) > self._config.max_items:
            raise BadRequest(
                f"{len(items)} media items, and at most {self._config.max_items} are allowed",
                slug="too_many_items",
                param="messages",
            )
        body = await self._media.inlined(body, items, context.tenant.name)
        items = mm_items(body)
        uuids = await self._uuids(items, self._config.scope_of(context.tenant))
        async with AsyncExitStack() as stack:
            yield await self._opened(stack, body, uuids, context)

    async def _opened(
        self,
        stack: AsyncExitStack,
        body: Body,
        uuids: Mapping[MMItem, str | None],
        context: RequestContext,
    ) -> Reply:
        """The answer; where an entry may have been lost on the way, that of a second attempt."""
        raw = self._config.decode_media == "raw"
        encoded = await self._encoder.encode(body, uuids, context)
        sent = consumer_body(body, encoded, raw=raw)
        try:
            return await stack.enter_async_context(self._answered(sent, context))
        except ProxyError as error:
            # An engine that cannot load what it was named fails the request and says no more than
            # that. What is lost is encoded again, and the media go along: nothing can be missing.
            if error.answered != HTTPStatus.INTERNAL_SERVER_ERROR or not names_entries(sent):
                raise
        context.retries += 1
        encoded = await self._encoder.encode(body, uuids, context)
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

    async def _uuids(self, items: Sequence[MMItem], scope: Scope) -> dict[MMItem, str | None]:
        """A content key for each item whose content is in the request, None for the others."""
        sources = {item: source(item, self._config.allowed_local_media_path) for item in items}
        return {
            item: await _key(scope, item, media) if isinstance(media, Inline) else None
            for item, media in sources.items()
        }

    def _route(self) -> Route:
        prefill = self._table.of(Role.PREFILL)
        return Route(
            prefill=self._table.pick(Role.PREFILL) if prefill else None,
            decode=self._table.pick(Role.DECODE if prefill else Role.PREFILL_DECODE),
        )


async def _key(scope: Scope, item: MMItem, media: Inline) -> str:
    if len(media.base64) <= HASH_IN_THREAD_BYTES:
        return content_key(scope, item.modality, media)
    return await asyncio.to_thread(content_key, scope, item.modality, media)
