"""`POST /v1/media`: upload of media before the request that uses them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import TypedDict

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.api.body import parse_object
from epd.api.endpoint import check_model
from epd.api.items import MM_KWARGS, MODALITY, Body, Modality
from epd.encoder_cache.client import EncoderCache
from epd.errors import BadRequest, ProxyError, no_store
from epd.events import ItemResult
from epd.request.request import Request
from epd.transfer.encoded import EncodedItem, metadata_uuid

FIELDS = frozenset({"model", "content", "priority", *MM_KWARGS})

STORED_WITHIN_S = 5.0
"""Time for an encode instance to write its outputs after its answer, in seconds."""

POLL_S = 0.02

MAX_NAME = 64
"""Maximum length of an unknown field's name in an error, in characters."""

Encode = Callable[[Request], Awaitable[Sequence[EncodedItem]]]
"""`Pipeline.encode`."""


class MediaShown(TypedDict):
    """Item with its encoder output in the store."""

    object: Literal["media"]
    modality: Modality
    uuid: str | None
    """Name for later requests: the client's, or the proxy's own."""
    key: str | None
    result: ItemResult
    tokens: int
    bytes: int
    """Size of the entry."""


class MediaPage(TypedDict):
    """The items of a request, in its order."""

    object: Literal["list"]
    data: list[MediaShown]


@dataclass(frozen=True, slots=True, eq=False)
class Warmup:
    """Warm-up that encodes media before the request that uses them."""

    _encode: Encode
    _cache: EncoderCache | None
    _stored_within_s: float = STORED_WITHIN_S

    async def push(self, make_request: Callable[[], Request]) -> MediaPage:
        """Return the answer to `POST /v1/media`, once all items are stored.

        `make_request` makes the request of the body that `parse` returns.

        Raises:
            BadRequest: a part is invalid.
            RequestRefused: 503, there is no store, or the outputs did not reach it.
            ProxyError: an item failed.
        """
        if self._cache is None:
            raise no_store("the proxy has no encoder store; set --ec-store")
        try:
            request = make_request()
            encoded_items = await self._encode(request)
        except ProxyError as error:
            param = error.param and error.param.removeprefix("messages[0].")
            raise error.at_param(param) from error.__cause__
        entries = await self._wait_entries(self._cache, request.body.get("model"), encoded_items)
        data = [_media_shown(encoded_item, request.body, entries) for encoded_item in encoded_items]
        return {"object": "list", "data": data}

    async def _wait_entries(
        self, cache: EncoderCache, model: str | None, encoded_items: Sequence[EncodedItem]
    ) -> Mapping[str, EntryInfo]:
        identifiers = {encoded_item.facts.identifier for encoded_item in encoded_items}
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + self._stored_within_s
        while None not in identifiers and clock() < deadline_s:
            keys = {
                EntryKey(namespace, str(encoded_item.facts.identifier))
                for encoded_item in encoded_items
                if (namespace := encoded_item.facts.namespace or cache.namespace(model))
            }
            entries = await cache.find_entries(list(keys), patient=True)
            if entries is not None and len(entries) == len(keys) >= len(identifiers):
                return {key.identifier: info for key, info in entries.items()}
            await asyncio.sleep(POLL_S)
        raise no_store(
            "the encode instances' outputs did not reach the store: check that they use "
            "the same store as --ec-store"
        )


def parse(raw: bytes | bytearray) -> Body:
    """Return a chat request for the media in `{"model": …, "content": [media parts of one]}`.

    Raises:
        BadRequest: the body is invalid.
    """
    body = parse_object(raw)
    if unknown := sorted(body.keys() - FIELDS):
        name = unknown[0][:MAX_NAME]
        raise BadRequest("the body has a field that this route does not accept", param=name)
    check_model(body)
    content = body.pop("content", None)
    if not isinstance(content, list) or not content:
        raise BadRequest("content must be a list of media parts", param="content")
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in MODALITY:
            raise BadRequest(
                f"content parts must be of the types {', '.join(MODALITY)}",
                param=f"content[{position}]",
            )
    return {**body, "messages": [{"role": "user", "content": content}]}


def _media_shown(
    encoded_item: EncodedItem, body: Body, entries: Mapping[str, EntryInfo]
) -> MediaShown:
    key, info = metadata_uuid(encoded_item, body), entries[str(encoded_item.facts.identifier)]
    return {
        "object": "media",
        "modality": encoded_item.item.modality,
        "uuid": encoded_item.item.uuid or key,
        "key": key,
        "result": encoded_item.result,
        "tokens": info.shape[0],
        "bytes": info.size_bytes,
    }
