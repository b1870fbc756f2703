"""`POST /v1/media` and `DELETE /v1/media/{uuid}`: media sent ahead, and forgotten."""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from ec_store import EntryInfo, StoreUnavailable
from epd.cache import EncoderCache
from epd.chat import MM_KWARGS, MODALITY, Body
from epd.config import ProxyConfig
from epd.errors import BadRequest, ProxyError, RequestRefused, UnknownMedia
from epd.identity import alias_key
from epd.pipeline import Pipeline
from epd.stages import RequestContext
from epd.transfer import EncodedItem

FIELDS = frozenset({"model", "content", "priority", *MM_KWARGS})

STORED_WITHIN_S = 5.0
"""How long an encode instance that has answered may take to write."""

POLL_S = 0.02


class Warmup:
    """Has media encoded ahead of the request that asks about them."""

    def __init__(self, pipeline: Pipeline, cache: EncoderCache | None, config: ProxyConfig) -> None:
        self._pipeline = pipeline
        self._cache = cache
        self._config = config

    async def push(self, asked: Any, context: RequestContext) -> dict[str, Any]:
        """The answer to `POST /v1/media`, once all items are in the store.

        Args:
            asked: `{"model": …, "content": [media parts of a chat request]}`.
            context: the request's.

        Raises:
            BadRequest: it is no such thing, or a part cannot be encoded.
            RequestRefused: 503, there is no store, or it does not keep what it is given.
            ProxyError: an item failed.
        """
        cache = self._needed()
        body = _chat_body(asked)
        try:
            encoded = await self._pipeline.encode(body, context)
        except ProxyError as error:
            error.param = error.param and error.param.removeprefix("messages[0].")
            raise
        found = await self._stored(cache, body.get("model"), encoded)
        data = [_described(one, found[str(one.encoded.identifier)]) for one in encoded]
        return {"object": "list", "data": data}

    async def forget(self, uuid: str, model: str | None, context: RequestContext) -> dict[str, Any]:
        """The answer to `DELETE /v1/media/{uuid}`: this tenant's name, and entries of its own.

        Where tenants share entries, another may use them: they are left to expire.

        Raises:
            UnknownMedia: this tenant has no media of this name.
            RequestRefused: 503, there is no store, or it gives no answer.
        """
        cache = self._needed()
        scope = self._config.scope_of(context.tenant)
        names = [alias_key(scope, modality, uuid) for modality in {*MODALITY.values()}]
        known = await cache.recall(model, names)
        if not known:
            raise UnknownMedia("no media are known under this uuid", param="uuid")
        own = list(known.values()) if self._config.isolation == "tenant" else []
        try:
            await cache.forget(model, list(known), own)
        except StoreUnavailable as error:
            raise _unavailable("the store gives no answer") from error
        return {"id": uuid, "object": "media.deleted", "deleted": True}

    def _needed(self) -> EncoderCache:
        if self._cache is None:
            raise _unavailable("the proxy has no encoder-cache store: --ec-store")
        return self._cache

    async def _stored(
        self, cache: EncoderCache, model: str | None, encoded: Sequence[EncodedItem]
    ) -> Mapping[str, EntryInfo]:
        """The entries of all items, once they are written."""
        wanted = {one.encoded.identifier for one in encoded}
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + STORED_WITHIN_S
        while None not in wanted and clock() < deadline_s:
            found = await cache.find(model, [str(identifier) for identifier in wanted])
            if found is not None and wanted <= found.keys():
                return found
            await asyncio.sleep(POLL_S)
        raise _unavailable("the encode instances' outputs did not come into the store")


def _chat_body(asked: Any) -> Body:
    if not isinstance(asked, dict):
        raise BadRequest("the body must be a JSON object")
    if unknown := sorted(asked.keys() - FIELDS):
        raise BadRequest(f"unknown field {unknown[0]!r}", param=unknown[0])
    content = asked.get("content")
    if not isinstance(content, list) or not content:
        raise BadRequest("content must be a list of media parts", param="content")
    for position, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in MODALITY:
            raise BadRequest(
                f"content parts must be of the types {', '.join(MODALITY)}",
                param=f"content[{position}]",
            )
    fields = {name: value for name, value in asked.items() if name != "content"}
    return {**fields, "messages": [{"role": "user", "content": content}]}


def _described(one: EncodedItem, info: EntryInfo) -> dict[str, Any]:
    return {
        "object": "media",
        "modality": one.item.modality,
        "uuid": one.item.uuid or one.key,
        "key": one.key,
        "result": one.result,
        "tokens": info.shape[0],
        "bytes": info.size_bytes,
    }


def _unavailable(message: str) -> RequestRefused:
    return RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, message, slug="no_store")
