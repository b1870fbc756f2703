"""The key of each item, by its content or by what its client calls it."""

import asyncio
from collections.abc import Mapping, Sequence

from epd.cache import EncoderCache
from epd.chat import Body, MMItem
from epd.config import ProxyConfig
from epd.errors import UnknownMedia
from epd.identity import alias_key, content_key
from epd.media import Inline, Known, source
from epd.tenants import Scope
from epd.transfer import EncodedItem

HASH_IN_THREAD_BYTES = 1024**2
"""Media above this size are hashed off the event loop."""


class Keys:
    """Gives items their keys, and remembers for whom they have which name.

    A client may name its media by a `uuid` of its own, and later send that alone. The name is one
    input of a digest that also holds the tenant: nobody can name another's.
    """

    def __init__(self, cache: EncoderCache | None, config: ProxyConfig) -> None:
        self._cache = cache
        self._config = config

    async def of(
        self, body: Body, items: Sequence[MMItem], scope: Scope
    ) -> dict[MMItem, str | None]:
        """The key of each item; None where only the engine sees the content.

        Raises:
            BadRequest: an item has no media, or has them where a request may not name them.
            UnknownMedia: nothing is known under a client's name for its media.
        """
        sources = {item: source(item, self._config.allowed_local_media_path) for item in items}
        names = {
            item: alias_key(scope, item.modality, media.uuid)
            for item, media in sources.items()
            if isinstance(media, Known)
        }
        known = await self._recalled(body, names)
        return {
            item: known[item]
            if item in known
            else await _content_key(scope, item, media)
            if isinstance(media, Inline)
            else None
            for item, media in sources.items()
        }

    async def remember(self, body: Body, encoded: Sequence[EncodedItem], scope: Scope) -> None:
        """Let clients name what they have sent: by their uuid, or by the key they were told."""
        if self._cache is None:
            return
        for one in encoded:
            if one.item.has_media and one.key is not None and one.result != "local":
                name = alias_key(scope, one.item.modality, one.item.uuid or one.key)
                await self._cache.remember(body.get("model"), name, one.item.modality, one.key)

    async def _recalled(self, body: Body, names: Mapping[MMItem, str]) -> dict[MMItem, str]:
        if not names:
            return {}
        found: Mapping[str, str] = {}
        if self._cache is not None:
            found = await self._cache.recall(body.get("model"), list({*names.values()}))
        for item, name in names.items():
            if name not in found:
                raise UnknownMedia(
                    "no media are known under this uuid: send them once more", param=item.param
                )
        return {item: found[name] for item, name in names.items()}


async def _content_key(scope: Scope, item: MMItem, media: Inline) -> str:
    if len(media.base64) <= HASH_IN_THREAD_BYTES:
        return content_key(scope, item.modality, media)
    return await asyncio.to_thread(content_key, scope, item.modality, media)
