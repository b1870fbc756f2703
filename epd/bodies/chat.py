"""A chat completion request: its mm items, and the bodies each stage is sent.

Bodies are read-only; every function returns a new one that shares what it did not change. The
wire is vLLM's chat completion API (`vllm/entrypoints/openai/chat_completion/protocol.py`).
"""

import gc
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from epd.errors import BadRequest

Body = Mapping[str, Any]

MODALITY = {
    "image_url": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
"""Modality of each content part type that carries media."""

EMBEDS = ("image_embeds", "audio_embeds", "video_embeds")
"""Parts that stand for an encoder output. The proxy writes them, a client must not: with an EC
consumer behind it, such a part reads whatever entry its `uuid` names."""

REASONING = ("reasoning", "reasoning_content")
"""Message fields that vLLM 0.33 reads like content, media parts and their uuids too."""

RESERVED = ("kv_transfer_params", "ec_transfer_params")
"""Fields between proxy and instances. A client's are dropped, as vLLM's security guide asks."""

MM_KWARGS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that change what the encoder makes of an item, and so its key."""

FOR_ENCODE = ("model", "priority", *MM_KWARGS)
"""Fields of a request that its encode requests need as well."""

NOT_FOR_PREFILL = ("stream_options", "min_tokens")
"""Fields that contradict a prefill request's `stream: false` and `max_tokens: 1`."""

UUID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What a client may call its media: bounded, and nothing that anyone would have to escape."""

MAX_DEPTH = 128
"""Levels of a body. orjson reads 1024 of them and writes 254, so what it has read it might not be
able to write; and other parsers recurse."""

MAX_VALUES = 200_000
"""Values in a body: enough for a bias of every token of a vocabulary. Small values take many times
their bytes of memory, and time in which nothing else runs."""

MAX_CONTAINERS = 50_000
"""Lists and objects in a body: ten thousand messages of several parts. They cost most: an empty
object is two bytes of JSON and over 64 of memory, and the garbage collector looks at each."""

_OWN_PARTS = (*EMBEDS, "image_pil")
_MARKED = frozenset({*MODALITY, *_OWN_PARTS, "uuid"})
"""Types and keys by which a content part is more than words."""


@dataclass(frozen=True, slots=True, eq=False)
class MMItem:
    """One media part of a request. Equal to itself only: the same picture twice is two items.

    Attributes:
        message: index of its message.
        position: index of the part in the message's content.
        kind: the part's type, a key of `MODALITY`.
        part: the content part as the client sent it.
    """

    message: int
    position: int
    kind: str
    part: Mapping[str, Any]

    @property
    def modality(self) -> str:
        """`image`, `audio` or `video`."""
        return MODALITY[self.kind]

    @property
    def uuid(self) -> str | None:
        """The client's own name for it; never to be sent to an instance."""
        return self.part.get("uuid")

    @property
    def has_media(self) -> bool:
        """Whether it brings its media, and not the client's name for them alone."""
        return self.part.get(self.kind) is not None or self.uuid is None

    @property
    def param(self) -> str:
        """Where it stands, as errors name it."""
        return f"messages[{self.message}].content[{self.position}]"


def parse(raw: bytes | bytearray) -> Body:
    """The request in a body.

    Raises:
        BadRequest: not JSON, or not an object with a list of messages.
    """
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if not isinstance(body.get("messages"), list):
        raise BadRequest("messages must be a list", param="messages")
    check_model(body)
    return {key: value for key, value in body.items() if key not in RESERVED}


def check_mm_kwargs(body: Body) -> None:
    """Refuse fields that change how media are processed, as vLLM does without its flag.

    Raises:
        BadRequest: there is one that is not empty.
    """
    for field in MM_KWARGS:
        if body.get(field):
            raise BadRequest(
                f"{field} can change what media cost to process; "
                "--trust-request-mm-kwargs of the proxy and of the instances lets it pass",
                slug="reserved_field",
                param=field,
            )


def check_model(body: Body) -> None:
    """Refuse a model that is no name.

    Raises:
        BadRequest: it is none.
    """
    if not isinstance(body.get("model"), str | None):
        raise BadRequest("model must be a string", param="model")


def parse_json(raw: bytes | bytearray) -> Any:
    """The value in a body.

    Raises:
        BadRequest: not JSON, or too much of it.
    """
    if _has_too_many(raw):
        raise BadRequest(
            f"the body has more than {MAX_CONTAINERS} lists and objects or {MAX_VALUES} values",
            slug="invalid_json",
        )
    # No garbage collection: it would look at all that was parsed again and again, for nothing.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = _loads(raw)
        if may_be_deep(raw) and deeper(value, MAX_DEPTH):
            raise BadRequest(
                f"the body is nested deeper than {MAX_DEPTH} levels", slug="invalid_json"
            )
    finally:
        if collects:
            gc.enable()
    return value


def _loads(raw: bytes | bytearray) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(
            f"the body is not valid JSON: {error.msg} at character {error.pos}", slug="invalid_json"
        ) from None


def _has_too_many(raw: bytes | bytearray) -> bool:
    """Whether a body has too many values, which is found out before memory is taken for them.

    Words may have commas and brackets too: where there are many, those in strings are left out.
    """
    return _count_too_many(raw) and _count_too_many(_without_strings(raw))


def _count_too_many(json: bytes | bytearray) -> bool:
    """Each value but the first comes after a comma or a bracket."""
    if len(json) <= MAX_CONTAINERS:
        return False
    containers = json.count(b"[") + json.count(b"{")
    return containers > MAX_CONTAINERS or containers + json.count(b",") >= MAX_VALUES


def _without_strings(raw: bytes | bytearray) -> bytes:
    """JSON without what is in its strings.

    A value has at most four quotation marks, with its key's: what comes after as many as there may
    be is left as it is, or a body of nothing else would become too many pieces.
    """
    quotes = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    pieces = quotes.split(b'"', 4 * MAX_VALUES)
    return b"".join(pieces[::2])


def may_be_deep(raw: bytes | bytearray) -> bool:
    """Whether JSON has so many brackets that what is in it might be nested deeper than it may."""
    return raw.count(b"[") + raw.count(b"{") > MAX_DEPTH


def deeper(value: Any, limit: int) -> bool:
    """Whether a value has more levels of lists and objects: level by level, as none may recurse."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (list, dict))  # a union would take twice as long
        ]
    return bool(level)


def mm_items(body: Body, most: int | None = None) -> tuple[MMItem, ...]:
    """The media parts of all messages, in order.

    Args:
        body: the request.
        most: how many there may be; what comes after one too many is not looked at.

    Raises:
        BadRequest: a message or a content part has the wrong shape, or there are too many items.
    """
    items: list[MMItem] = []
    for message, position, part in _content_parts(body):
        if part["type"] not in MODALITY:
            continue
        if len(items) == most:
            raise BadRequest(
                f"a request may have at most {most} media items",
                slug="too_many_items",
                param="messages",
            )
        items.append(MMItem(message, position, part["type"], part))
    return tuple(items)


def _content_parts(body: Body) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    for index, message in enumerate(body["messages"]):
        if not isinstance(message, dict):
            raise BadRequest("a message must be an object", param=f"messages[{index}]")
        for field in REASONING:
            if not isinstance(message.get(field), str | None):
                raise BadRequest(f"{field} must be a string", param=f"messages[{index}].{field}")
        content = message.get("content")
        if isinstance(content, list):
            for position, part in enumerate(content):
                if isinstance(part, str):  # vLLM takes it for text
                    continue
                if not _is_plain(part):
                    _check_part(part, param=f"messages[{index}].content[{position}]")
                yield index, position, part


def _is_plain(part: Any) -> bool:
    """Whether a part needs no further look, as most of a long conversation's."""
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return isinstance(kind, str) and kind not in _MARKED and _MARKED.isdisjoint(part)


def _check_part(part: Any, *, param: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRequest("a content part must be an object with a type", param=param)
    for key in _OWN_PARTS:
        if key in part or part["type"] == key:
            raise BadRequest(
                f"{key} parts are the proxy's own and not accepted from clients",
                slug="reserved_field",
                param=param,
            )
    if "uuid" in part and part["type"] not in MODALITY:
        raise BadRequest("uuid belongs on media parts only", slug="reserved_field", param=param)
    _check_uuid(part.get("uuid"), param=f"{param}.uuid")
    # vLLM goes by the keys of a part that has a uuid and by its type otherwise: a part where
    # they disagree would be one thing here and another there.
    for key in MODALITY:
        if key in part and part["type"] != key:
            raise BadRequest(f"a part with {key} must have the type {key}", param=param)


def _check_uuid(uuid: Any, *, param: str) -> None:
    if uuid is None:
        return
    if not isinstance(uuid, str) or UUID.fullmatch(uuid) is None:
        raise BadRequest("a uuid has 1 to 128 of A-Z a-z 0-9 . _ : -", param=param)


def with_parts(body: Body, parts: Mapping[MMItem, Mapping[str, Any]]) -> Body:
    """The body with other parts in the places of these items."""
    new = {(item.message, item.position): part for item, part in parts.items()}
    touched = {item.message for item in parts}
    messages = list(body["messages"])
    for index in touched:
        content = [
            new.get((index, position), part)
            for position, part in enumerate(messages[index]["content"])
        ]
        messages[index] = {**messages[index], "content": content}
    return {**body, "messages": messages}


def raw_part(item: MMItem, uuid: str | None) -> Mapping[str, Any]:
    """The item's media under our own uuid; a client's never goes through."""
    part = {key: value for key, value in item.part.items() if key != "uuid"}
    return part if uuid is None else {**part, "uuid": uuid}


def metadata_part(item: MMItem, metadata: Mapping[str, Any], uuid: str) -> Mapping[str, Any]:
    """The item without its media: an encoder output by key, and what sizes its placeholder.

    Values are flat per item, `image_grid_thw` being `[t, h, w]`: vLLM stacks them.
    """
    kind = f"{item.modality}_embeds"
    return {
        "type": kind,
        kind: {key: _flat(value) for key, value in metadata.items()},
        "uuid": uuid,
    }


def _flat(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        return [number for row in value for number in row]
    return value


def names_entries(body: Body) -> bool:
    """Whether a body for prefill and decode has items without their media."""
    contents = (message.get("content") for message in body["messages"])
    return any(
        isinstance(part, dict) and part["type"] in EMBEDS
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def encode_body(body: Body, item: MMItem, uuid: str | None) -> Body:
    """The encode request of one item: the item alone, no text."""
    return {
        **{field: body[field] for field in FOR_ENCODE if field in body},
        "messages": [{"role": "user", "content": [raw_part(item, uuid)]}],
        "stream": False,
        "max_tokens": 1,
    }


def prefill_body(body: Body, kv_transfer_params: Mapping[str, Any]) -> Body:
    """The prefill request: the same prompt, one token, the KV cache kept for decode."""
    return {**_one_token(body), "stream": False, "kv_transfer_params": kv_transfer_params}


def release_body(body: Body) -> Body:
    """A decode request as short as can be, and answered at once: its head comes before a token."""
    return {
        **_one_token(body),
        "stream": True,
        "kv_transfer_params": body["kv_transfer_params"],
    }


def _one_token(body: Body) -> Body:
    limits = {field: 1 for field in ("max_tokens", "max_completion_tokens") if field in body}
    kept = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
    return {**kept, **limits, "max_tokens": 1}
