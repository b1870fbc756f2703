"""What prefill and decode are sent of items that encode instances have encoded."""

import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ec_store.entry import EntryInfo
from epd.api.body import reply_field
from epd.api.items import MM_KWARGS, Body, MMItem, metadata_part, raw_part, with_parts
from epd.errors import EncodeMismatch, UnknownMedia
from epd.events import ItemResult
from epd.transfer.params import Params

METADATA_ONLY = ("image", "audio")
"""Modalities whose placeholder metadata has all that a consumer needs."""

TIMESTAMPS = "timestamps"
"""A field by which a video's metadata has it too: Qwen3-VL's, which puts times into the prompt.
Qwen2.5-VL needs the frame rate and reports none: the answer would silently differ from the raw
video's."""

CONTENT_HASH_LENGTHS = (64, 128)
"""Digits of the hashes vLLM names media by: blake3 and sha256, or sha512
(`vllm/multimodal/hasher.py`)."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What an encode instance said of one item.

    Attributes:
        params: its `ec_transfer_params`, empty where it reported none (vLLM before 0.32).
        identifier: vLLM's key of the encoder output, where one was reported.
        metadata: placeholder fields such as `image_grid_thw`; empty: the media must go on raw.
        namespace: where its connector keeps the model's entries, if it is one that says so.
    """

    params: Params = field(default_factory=dict)
    identifier: str | None = None
    metadata: Params = field(default_factory=dict)
    namespace: str | None = None


def from_entry(info: EntryInfo) -> Encoded:
    """What the store's entry of an item says of it.

    There are no `ec_transfer_params`: they would promise a consumer an entry that may still come.
    """
    key = info.key
    return Encoded(identifier=key.identifier, metadata=info.metadata, namespace=key.namespace)


def read_encoded(reply: bytes, modality: str) -> Encoded:
    """The `ec_transfer_params` of one item's encode reply.

    Raises:
        UpstreamFailed: the reply is not JSON.
        EncodeMismatch: what it reports does not fit one item. To guess here would put one
            picture's tensor into another's place.
    """
    params = reply_field(reply, "ec_transfer_params", stage="encode")
    if not params:
        return Encoded()
    if not all(isinstance(entry, dict) for entry in params.values()):
        raise EncodeMismatch("an entry is not an object")
    if len(params) > 1:
        # A video with its sound (use_audio_in_video) makes two features of one part.
        if len({str(entry.get("modality")) for entry in params.values()}) != len(params):
            raise EncodeMismatch("several features for one item")
        return Encoded(params)
    [(identifier, entry)] = params.items()
    if entry.get("modality", modality) != modality:
        raise EncodeMismatch("it is of another modality")
    match entry.get("item_indices", [0]):
        case [int() as index] if index == 0 and index is not False:
            pass
        case _:
            raise EncodeMismatch("an item index is out of range")
    metadata = entry.get("metadata") or {}
    if not isinstance(metadata, dict) or not all(map(_is_numbers, metadata.values())):
        raise EncodeMismatch("its metadata are not lists of numbers")
    namespace = entry.get("namespace")
    return Encoded(params, identifier, metadata, namespace if isinstance(namespace, str) else None)


def _is_numbers(value: Any) -> bool:
    """Return whether a value is a list of numbers, or of lists of numbers."""
    if not isinstance(value, list):
        return False
    for row in value:
        for number in row if isinstance(row, list) else (row,):
            if not isinstance(number, (int, float)):  # a union would take twice as long
                return False
    return True


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item whose encoder output was asked for.

    Attributes:
        item: the item.
        uuid: what it was sent under; None: an engine hashed it.
        encoded: what is known of the output.
        result: where it comes from.
    """

    item: MMItem
    uuid: str | None
    encoded: Encoded
    result: ItemResult


class Consumed(NamedTuple):
    """What prefill and decode are sent.

    Attributes:
        body: it.
        depends: whether it fails where an encoder output is not there: it has items without their
            media, or waits for a push.
        fetches: whether it has media that the instance fetches.
        bare: how many of its items are without their media.
    """

    body: Body
    depends: bool = False
    fetches: bool = False
    bare: int = 0


def consumer_body(
    body: Body, items: Sequence[EncodedItem], params: Params, *, raw: bool
) -> Consumed:
    """The request for prefill and decode, once its items are encoded.

    Items go on metadata-only where that is known to give the same answer for all of them, and all
    raw otherwise. Raw items are found in the store all the same, by the same key.

    Args:
        body: the request as the client sent it.
        items: all its items.
        params: their `ec_transfer_params`; empty: none.
        raw: send all media raw, where all items have theirs.

    Raises:
        UnknownMedia: an item without media must go on with them.
    """
    if not items:
        return Consumed(body)
    uuids = metadata_uuids(items, body, raw=raw)
    for one in items:
        if one.item not in uuids and not one.item.has_media:
            raise UnknownMedia(
                "this request needs the media themselves: a uuid is not enough",
                param=one.item.param,
            )
    parts = {
        one.item: metadata_part(one.item, one.encoded.metadata, uuids[one.item])
        if one.item in uuids
        else raw_part(one.item, one.uuid)
        for one in items
    }
    body = with_parts(body, parts)
    return Consumed(
        {**body, "ec_transfer_params": params} if params else body,
        depends=bool(uuids),
        fetches=any(one.item.remote and one.item not in uuids for one in items),
        bare=len(uuids),
    )


def metadata_uuids(items: Sequence[EncodedItem], body: Body, *, raw: bool) -> dict[MMItem, str]:
    """Return the items to send metadata-only, with the `uuid` of each: all of them, or none.

    vLLM rejects a request that mixes metadata-only and raw items of one modality
    (`vllm/renderers/chat_utils.py`, `_resolve_items`). Whether it accepts a mixture of modalities
    depends on the model: the processors of Qwen2.5-Omni, Keye and LLaVA-OneVision-2 write dummy
    text for all items but get the media of the raw ones alone, which is a 400, and those of
    Qwen2-VL, Qwen2.5-VL and Qwen3-VL accept it. Nothing that an encode instance reports tells them
    apart: Qwen2.5-Omni and Keye report an item's fields as Qwen2-VL does.

    Items that came without their media can only be metadata-only. Their request may mix modalities,
    but not with audio, whose processors look at the items of other modalities.
    """
    complete = all(one.item.has_media for one in items)
    if raw and complete:
        return {}
    uuids, raw_modalities = dict[MMItem, str](), set[str]()
    for one in items:
        uuid = metadata_uuid(one, body)
        if uuid is None:
            raw_modalities.add(one.item.modality)
        else:
            uuids[one.item] = uuid
    if not raw_modalities:
        return uuids
    if complete or any(one.item.modality == "audio" for one in items):
        return {}
    return {item: uuid for item, uuid in uuids.items() if item.modality not in raw_modalities}


def metadata_uuid(one: EncodedItem, body: Body) -> str | None:
    """The `uuid` under which a consumer finds this encoder output without seeing the media.

    Media that were sent under our uuid have it. Others were hashed by the engine, whose
    identifier serves as a uuid only if the consumer takes it verbatim: with processor kwargs it
    would hash it again, and with a LoRA on the vision tower it would prefix it again.
    """
    metadata = one.encoded.metadata
    sufficient = one.item.modality in METADATA_ONLY or TIMESTAMPS in metadata
    if not (one.item.named and metadata and sufficient):
        return None
    if one.uuid is not None:
        return one.uuid
    identifier = one.encoded.identifier or ""
    is_hash = len(identifier) in CONTENT_HASH_LENGTHS and set(identifier) <= set(string.hexdigits)
    return identifier if is_hash and not any(body.get(field) for field in MM_KWARGS) else None
