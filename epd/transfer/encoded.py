"""Replies of encode instances, and the requests that prefill and decode get with encoded items."""

import string
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ec_store.entry import EntryInfo
from epd.api.body import reply_field
from epd.api.items import MM_KWARGS, Body, MMItem, metadata_part, raw_part, with_parts
from epd.errors import EncodeMismatch, UnknownMedia
from epd.events import ItemResult
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.table import NO_WORK, Work
from epd.transfer import Params

METADATA_ONLY = ("image", "audio")
"""Modalities for which the placeholder metadata are all that a consumer needs."""

TIMESTAMPS = "timestamps"
"""Metadata field that makes a video's metadata sufficient too: Qwen3-VL puts times into the prompt.
Qwen2.5-VL needs the frame rate but does not report it: without the raw video, the answer would
silently differ."""

CONTENT_HASH_LENGTHS = (64, 128)
"""Lengths of vLLM's media hashes in hexadecimal digits: blake3 and sha256, or sha512
(`vllm/multimodal/hasher.py`)."""


class OutputFacts(NamedTuple):
    """Facts about an item's encoder output, from an encode instance's reply or from the store.

    Attributes:
        params: `ec_transfer_params` of the reply; empty if it has none (vLLM before 0.32).
        identifier: vLLM's key of the encoder output, if known.
        metadata: placeholder fields such as `image_grid_thw`; empty if consumers need the media.
        namespace: namespace of the model's entries, if the instance's connector reports it.
    """

    params: Mapping[str, Any] = {}
    identifier: str | None = None
    metadata: Mapping[str, Any] = {}
    namespace: str | None = None


def from_entry(info: EntryInfo) -> OutputFacts:
    """Return the facts in the store's entry of an item.

    `ec_transfer_params` stay empty. They would promise the entry to the consumer, which waits for
    a promised entry that it does not find.
    """
    key = info.key
    return OutputFacts(identifier=key.identifier, metadata=info.metadata, namespace=key.namespace)


def read_encoded(reply: bytes, modality: str) -> OutputFacts:
    """Return the facts in the `ec_transfer_params` of one item's encode reply.

    Raises:
        UpstreamFailed: the reply is not JSON.
        EncodeMismatch: the reply does not fit one item. A guess could put one picture's tensor in
            the place of another's.
    """
    params = reply_field(reply, "ec_transfer_params", stage="encode")
    if not params:
        return OutputFacts()
    if not all(isinstance(entry, dict) for entry in params.values()):
        raise EncodeMismatch("an entry is not an object")
    if len(params) > 1:
        # A video with its sound (use_audio_in_video) makes two features of one part.
        if len({str(entry.get("modality")) for entry in params.values()}) != len(params):
            raise EncodeMismatch("several features for one item")
        return OutputFacts(params)
    [(identifier, entry)] = params.items()
    match entry.get("item_indices", [0]):
        case [int() as index] if index == 0 and index is not False:
            return _read_entry(identifier, entry, modality)
        case _:
            raise EncodeMismatch("an item index is out of range")


def _read_entry(identifier: str, entry: Params, modality: str) -> OutputFacts:
    if entry.get("modality", modality) != modality:
        raise EncodeMismatch("their modality differs from the item's")
    metadata = entry.get("metadata") or {}
    if not isinstance(metadata, dict) or not all(map(_is_numbers, metadata.values())):
        raise EncodeMismatch("the metadata are not lists of numbers")
    namespace = entry.get("namespace")
    namespace = namespace if isinstance(namespace, str) else None
    return OutputFacts({identifier: entry}, identifier, metadata, namespace)


def _is_numbers(value: Any) -> bool:
    """Return whether a value is a list of numbers, or of lists of numbers."""
    if not isinstance(value, list):
        return False
    for row in value:
        for number in row if isinstance(row, list) else (row,):
            if not isinstance(number, (int, float)):  # a union would take twice as long
                return False
    return True


class EncodedItem(NamedTuple):
    """An item with the facts about its encoder output.

    Attributes:
        result: source of the output.
        tokens: predicted number of its tokens, if prefill or decode encodes it.
    """

    item: MMItem
    facts: OutputFacts
    result: ItemResult
    tokens: int = 0


class Prompt(NamedTuple):
    """What prefill and decode are sent, before the `kv_transfer_params`.

    Attributes:
        depends: whether the request fails if something it names is missing: an encoder output,
            because items have no media or the consumer waits for a push; or KV blocks.
        fetches: whether the instance must fetch media.
        bare: items that are sent without media.
        named: whether media are sent under a name.
        mark: name of the prompt in the KV events of instances; empty for none.
        prefix: content of the prompt, if instances are chosen by it.
        work: predicted work of the instance that prefills.
    """

    body: Body
    depends: bool = False
    fetches: bool = False
    bare: Collection[MMItem] = ()
    named: bool = False
    mark: str = ""
    prefix: Prefix = NO_PREFIX
    work: Work = NO_WORK


def consumer_body(
    body: Body, items: Sequence[EncodedItem], params: Params, *, raw: bool, named: bool = True
) -> Prompt:
    """Return the request for prefill and decode with its encoded items.

    Items are sent metadata-only if this is known to give the same answer for all of them, and raw
    otherwise; with `raw`, all are raw if all have media. The outputs of raw items are found in the
    store too, by the same key, unless they are not `named`. The parameters are the
    `ec_transfer_params`; empty for none.

    Raises:
        UnknownMedia: an item must be sent raw but has no media.
    """
    if not items:
        return Prompt(body)
    uuids = _metadata_uuids(items, body, raw=raw)
    parts = {}
    for encoded_item in items:
        item = encoded_item.item
        if item in uuids:
            parts[item] = metadata_part(item, encoded_item.facts.metadata, uuids[item])
        elif item.has_media:
            parts[item] = raw_part(item, named=named)
        else:
            raise UnknownMedia(
                "this request needs the media themselves: a uuid is not enough",
                param=item.param_path,
            )
    body = with_parts(body, parts)
    return Prompt(
        {**body, "ec_transfer_params": params} if params else body,
        depends=bool(uuids),
        fetches=any(item.is_remote and item not in uuids for item in parts),
        bare=uuids.keys(),
        named=named and any(item.engine_name and item not in uuids for item in parts),
    )


def _metadata_uuids(items: Sequence[EncodedItem], body: Body, *, raw: bool) -> dict[MMItem, str]:
    """Return the items to send metadata-only, with the `uuid` of each: all or none if possible.

    vLLM rejects a request that mixes metadata-only and raw items of one modality
    (`vllm/renderers/chat_utils.py`, `_resolve_items`). Whether it accepts a mixture of modalities
    depends on the model. The processors of Qwen2.5-Omni, Keye and LLaVA-OneVision-2 write dummy
    text for all items but get only the media of the raw ones, so the request fails with 400. Those
    of Qwen2-VL, Qwen2.5-VL and Qwen3-VL accept a mixture. The reports of encode instances do not
    distinguish the models: Qwen2.5-Omni and Keye report the same fields as Qwen2-VL.

    Items that the client sent without media can only be metadata-only. Their request may mix
    modalities, except with audio: its processors read the items of other modalities.
    """
    complete = all(encoded_item.item.has_media for encoded_item in items)
    if raw and complete:
        return {}
    uuids, raw_modalities = dict[MMItem, str](), set[str]()
    for encoded_item in items:
        uuid = metadata_uuid(encoded_item, body)
        if uuid is None:
            raw_modalities.add(encoded_item.item.modality)
        else:
            uuids[encoded_item.item] = uuid
    if not raw_modalities:
        return uuids
    if complete or any(encoded_item.item.modality == "audio" for encoded_item in items):
        return {}
    return {item: uuid for item, uuid in uuids.items() if item.modality not in raw_modalities}


def metadata_uuid(encoded_item: EncodedItem, body: Body) -> str | None:
    """Return the `uuid` under which a consumer finds an encoder output without the media, if any.

    Media that were sent under the proxy's uuid have that one. An engine hashed the others. Its
    identifier serves as a uuid only if the consumer uses it unchanged: with processor kwargs the
    consumer would hash it again, and with a LoRA on the vision tower it would prefix it again.
    """
    item, metadata = encoded_item.item, encoded_item.facts.metadata
    sufficient = item.modality in METADATA_ONLY or TIMESTAMPS in metadata
    if not (item.is_named and metadata and sufficient):
        return None
    if item.engine_name is not None:
        return item.engine_name
    identifier = encoded_item.facts.identifier or ""
    is_hash = len(identifier) in CONTENT_HASH_LENGTHS and set(identifier) <= set(string.hexdigits)
    return identifier if is_hash and not any(body.get(field) for field in MM_KWARGS) else None
