"""One request: its route, then encode, prefill where there is one, decode."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from epd.chat import Body, MMItem, mm_items
from epd.config import ProxyConfig
from epd.errors import BadRequest
from epd.fetch import RemoteMedia
from epd.identity import content_key
from epd.instances import Instance, InstanceTable, Role
from epd.media import Inline, source
from epd.stages import RequestContext, Stages
from epd.transfer import consumer_body
from epd.upstream import Reply, Upstream

HASH_IN_THREAD_BYTES = 1024**2
"""Media above this size are hashed off the event loop."""


@dataclass(frozen=True, slots=True)
class Route:
    """The instances of one attempt.

    Attributes:
        encode: one per item.
        prefill: None in E+PD.
        decode: the one that answers.
    """

    encode: tuple[Instance, ...]
    prefill: Instance | None
    decode: Instance


class Pipeline:
    """Carries requests through the stages. Holds no state of its own but whose turn it is."""

    def __init__(
        self, table: InstanceTable, upstream: Upstream, media: RemoteMedia, config: ProxyConfig
    ) -> None:
        self._table = table
        self._media = media
        self._stages = Stages(upstream, config)
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
        body = await self._media.inlined(body, items)
        items = mm_items(body)
        uuids = await self._uuids(items)
        route = self._route(len(items))
        encoded = await self._stages.encode(route.encode, body, uuids, context)
        body = consumer_body(body, encoded, raw=self._config.decode_media == "raw")
        if route.prefill is not None:
            params = await self._stages.prefill(route.prefill, body, context)
            body = {**body, "kv_transfer_params": params}
        async with self._stages.decode(route.decode, body, context) as reply:
            yield reply

    async def _uuids(self, items: Sequence[MMItem]) -> dict[MMItem, str | None]:
        """A content key for each item whose content is in the request, None for the others."""
        sources = {item: source(item, self._config.allowed_local_media_path) for item in items}
        return {
            item: await _key(item, media) if isinstance(media, Inline) else None
            for item, media in sources.items()
        }

    def _route(self, items: int) -> Route:
        prefill = self._table.of(Role.PREFILL)
        return Route(
            encode=self._table.pick_many(Role.ENCODE, items) if items else (),
            prefill=self._table.pick(Role.PREFILL) if prefill else None,
            decode=self._table.pick(Role.DECODE if prefill else Role.PREFILL_DECODE),
        )


async def _key(item: MMItem, media: Inline) -> str:
    if len(media.base64) <= HASH_IN_THREAD_BYTES:
        return content_key(item.modality, media)
    return await asyncio.to_thread(content_key, item.modality, media)
