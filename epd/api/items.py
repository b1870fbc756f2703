"""Media items: their places in a request, and the checks of content parts. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

from epd.errors import BadRequest

Body = Mapping[str, Any]
Part = Mapping[str, Any]
Path = tuple[str | int, ...]

Modality = Literal["image", "audio", "video"]

MODALITY: Mapping[str, Modality] = {
    "image_url": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
"""Modality of each content part type that carries media, in a chat request."""

TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
"""Content part types that carry no media (`TEXT_PART_TYPES` and `tool_reference` in
`vllm/renderers/chat_utils`)."""

PICTURE = "input_image"
"""Content part type of a picture in the responses API. vLLM accepts it in a chat request too."""

EMBEDS = ("image_embeds", "audio_embeds", "video_embeds")
"""Parts that stand for an encoder output. Only the proxy may write them: an EC consumer reads the
entry that the `uuid` of such a part names, whichever it is."""

REASONING = ("reasoning", "reasoning_content")
"""Message fields that vLLM 0.33 reads like content, including media parts and their uuids."""

MM_KWARGS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that change the encoder output of an item, and so its key."""

UUID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Pattern of a client's name for its media: bounded, and without characters that need escapes."""

REFUSED = (*EMBEDS, "image_pil", "prompt_embeds")
"""Parts of vLLM's API that clients must not send. Their keys are rejected in other parts too,
because vLLM may read a part by its keys. `prompt_embeds` is a serialized tensor, which no check of
the proxy covers and which both prefill and decode would load."""

_MARKED = frozenset({*MODALITY, *REFUSED, "uuid"})
"""Types and keys of content parts that are not only text. All other fields of a media part are for
the chat template (`_collect_extra_fields` in `vllm/renderers/chat_utils`)."""


@dataclass(frozen=True, slots=True)
class Form:
    """Format of a media part in an API that differs from chat.

    Attributes:
        write: converts a chat part to this format.
        media: place of the media in the part, as errors name it; empty if the part is the media.
        named: whether the part can name the key of an encoder output.
    """

    write: Callable[[Part], Any]
    media: str
    named: bool


@dataclass(frozen=True, slots=True, eq=False)
class MMItem:
    """Media part of a request. Equal only to itself: the same picture twice is two items.

    Attributes:
        path: place of the part: keys and indices, from the body inwards.
        kind: type of the part, a key of `MODALITY`.
        part: the content part in the format of a chat request.
        form: format of the part in its own request; None for that of chat.
        content_key: its key; None if an engine makes the key, and before `Keys.keyed_items`.
        pixels: number of a picture's pixels, if it is in the request; 0 if unknown.
    """

    path: Path
    kind: str
    part: Part
    form: Form | None = None
    content_key: str | None = None
    pixels: int = 0

    def with_key(self, key: str, pixels: int = 0) -> "MMItem":
        """Return the item with its key, in half the time of `dataclasses.replace`."""
        return MMItem(self.path, self.kind, self.part, self.form, key, pixels)

    @property
    def modality(self) -> Modality:
        return MODALITY[self.kind]

    @property
    def uuid(self) -> str | None:
        """The client's own name for the media; never sent to an instance."""
        return self.part.get("uuid")

    @property
    def has_media(self) -> bool:
        """Whether the part has media, and not only the client's name for them."""
        return self.uuid is None or bool(_media_text(self.kind, self.part.get(self.kind)))

    @property
    def is_remote(self) -> bool:
        """Whether the media are at a URL, so that a component must fetch them."""
        value = self.part.get(self.kind)
        url = value.get("url") if isinstance(value, dict) else None
        return isinstance(url, str) and url[:5].lower() != "data:"

    @property
    def is_named(self) -> bool:
        """Whether the request can name the key of the item's encoder output."""
        return self.form is None or self.form.named

    @property
    def identity(self) -> str:
        """What items with the same media have in common: the key, or else the URL."""
        return self.content_key or str(self.part.get(self.kind))

    @property
    def engine_name(self) -> str | None:
        """Name of the item in requests to engines; None to leave it unnamed."""
        return self.content_key if self.is_named else None

    @property
    def param_path(self) -> str:
        """Place of the part, as errors name it, such as `messages[0].content[2]`."""
        return param_path(self.path)

    @property
    def media_param(self) -> str:
        media = f"{self.kind}.url" if self.form is None else self.form.media
        return f"{self.param_path}.{media}" if media else self.param_path


def param_path(path: Path) -> str:
    """Return a place in a body, as errors name it."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join(steps).removeprefix(".")


def at_most(items: Iterable[MMItem], most: int | None) -> tuple[MMItem, ...]:
    """Return the items. Items after the first excess one are not read.

    Raises:
        BadRequest: there are more than `most` items, or one of them is invalid.
    """
    found: list[MMItem] = []
    for item in items:
        if len(found) == most:
            raise BadRequest(
                f"a request may have at most {most} media items",
                slug="too_many_items",
                param=param_path(item.path[:1]),
            )
        found.append(item)
    return tuple(found)


def chat_items(messages: list[Any], path: Path) -> Iterator[MMItem]:
    """Yield the media parts of a conversation's messages, in order.

    Raises:
        BadRequest: a message or a content part has the wrong shape, or a part has an unknown type.
    """
    for index, message in enumerate(messages):
        content = check_message(message, path, index).get("content")
        if isinstance(content, list):
            yield from content_items(content, (*path, index, "content"))


def content_items(content: list[Any], path: Path) -> Iterator[MMItem]:
    """Yield the media parts of one content, in order. Raise `BadRequest` if a part is invalid."""
    for position, part in enumerate(content):
        if isinstance(part, str) or _is_text(part):  # vLLM treats a string as text
            continue
        if (item := _media_item(part, (*path, position))) is not None:
            yield item


def _media_item(part: Any, path: Path) -> MMItem | None:
    """Return the media item of a content part; None for a part that is text.

    The item has the part in the format of chat, for every spelling that vLLM accepts.
    """
    if isinstance(part, dict):
        if part.get("type") is None:
            part = _with_type(part, path)
        elif part["type"] == PICTURE:
            return MMItem(path, "image_url", picture_part(part, path))
    check_part(part, path)
    if part["type"] in MODALITY:
        return MMItem(path, part["type"], _media_part(part))
    if part["type"] not in TEXTS:
        raise unknown_part(path, (*sorted(TEXTS), *MODALITY, PICTURE))
    return None


def _with_type(part: Part, path: Path) -> Part:
    """Return a content part without a type, with the type that vLLM derives from its keys."""
    kinds = [key for key in MODALITY if key in part]
    for key in [key for key in kinds if part[key] is not None] or kinds:
        return {**part, "type": key, key: _as_object(key, part[key])}
    if "tool_reference" in part and part.keys().isdisjoint(REFUSED):
        return {**part, "type": "tool_reference"}
    raise BadRequest("a content part must have a type", param=param_path(path))


def _media_part(part: Part) -> Part:
    """Return a media part with only its own media, and without fields that are null.

    Typed clients write every field that they know. The proxy adds a `uuid`, and vLLM reads a part
    with a `uuid` by its keys, even if their values are null. The other fields, which vLLM passes to
    the chat template, are kept.
    """
    kind, uuid = part["type"], part.get("uuid")
    value = _as_object(kind, part.get(kind)) if uuid else part.get(kind)
    if isinstance(value, dict) and None in value.values():
        value = {key: value[key] for key in value if value[key] is not None}
    elif part.keys() & _MARKED == {kind}:
        return part
    others = {key: part[key] for key in part if key not in _MARKED}
    return {**others, kind: value, "uuid": uuid} if uuid else {**others, kind: value}


def _as_object(kind: str, value: Any) -> Any:
    """Return a media part's value as an object: parts with a uuid or no type may have a URL."""
    return {"url": value} if isinstance(value, str) and kind != "input_audio" else value


def _media_text(kind: str, value: Any) -> Any:
    """Return the URL or the base64 in the value of a media field; anything empty for none."""
    if isinstance(value, dict):
        return value.get("data" if kind == "input_audio" else "url")
    return value


def picture_part(part: Part, path: Path) -> Part:
    """Return an `input_image` part in the format of a chat request.

    Raises:
        BadRequest: the part has neither an `image_url` nor a `uuid`, or has an invalid field.
    """
    others = {key: part[key] for key in part if key != "image_url"}
    check_part(others, path, kinds=(PICTURE,))
    url, uuid = part.get("image_url"), part.get("uuid")
    if uuid:
        url = _media_text("image_url", url)
    if (url or not uuid) and not (url and isinstance(url, str)):
        raise BadRequest(
            f'an {PICTURE} needs an "image_url" that is a string; the proxy stores no files',
            param=param_path((*path, "image_url")),
        )
    if others.get("detail", "") is None:
        del others["detail"]
    return _media_part({**others, "type": "image_url", "image_url": {"url": url}})


def unknown_part(path: Path, known: Iterable[str]) -> BadRequest:
    """Return the error for a content part of a type that no check of the proxy covers."""
    return BadRequest(
        f"the type of this content part is not accepted; accepted types: {', '.join(known)}",
        slug="unknown_content_part",
        param=param_path((*path, "type")),
    )


def check_message(message: Any, path: Path, index: int) -> Mapping[str, Any]:
    """Return a message, or an item that vLLM treats as a message.

    Raises:
        BadRequest: it is not a message, or may have media in a field that is not searched for them.
    """
    if not isinstance(message, dict):
        raise BadRequest("a message must be an object", param=param_path((*path, index)))
    for field in REASONING:
        if not isinstance(message.get(field), str | None):
            raise BadRequest(f"{field} must be a string", param=param_path((*path, index, field)))
    return message


def _is_text(part: Any) -> bool:
    """Return whether a part is text and needs no other check, as most parts of a conversation."""
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return isinstance(kind, str) and kind in TEXTS and _MARKED.isdisjoint(part)


def check_part(part: Any, path: Path, kinds: Iterable[str] = MODALITY) -> None:
    """Reject a content part that the proxy and an instance could read differently.

    Only parts of these `kinds` may have a `uuid`.

    Raises:
        BadRequest: the part is ambiguous, reserved, or not a content part.
    """
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRequest("a content part must be an object with a type", param=param_path(path))
    kind, uuid = part["type"], part.get("uuid")
    for key in REFUSED:
        if part.get(key) or kind == key:
            raise BadRequest(
                f"{key} parts are not accepted from clients",
                slug="reserved_field",
                param=param_path(path),
            )
    if uuid is not None and kind not in kinds:
        raise BadRequest(
            "uuid belongs on media parts only", slug="reserved_field", param=param_path(path)
        )
    if uuid not in (None, "") and (not isinstance(uuid, str) or UUID.fullmatch(uuid) is None):
        raise BadRequest(
            "a uuid has 1 to 128 of A-Z a-z 0-9 . _ : -", param=param_path((*path, "uuid"))
        )
    # vLLM reads a part with a uuid by its keys, and other parts by their type. If the two disagree,
    # the proxy and an instance could read the part differently. Empty fields are no media.
    for key in MODALITY:
        if key in part and kind != key and _media_text(key, part[key]):
            raise BadRequest(f"a part with {key} must have the type {key}", param=param_path(path))


def with_parts(body: Body, parts: Mapping[MMItem, Part]) -> Body:
    """Return the body with other parts, in the format of chat, in the places of these items."""
    new = {**body}
    copies: dict[Path, Any] = {(): new}
    for item, part in parts.items():
        holder: Any = new
        for depth, step in enumerate(item.path[:-1], 1):
            where = item.path[:depth]
            if where not in copies:
                copies[where] = holder[step] = copy(holder[step])
            holder = copies[where]
        holder[item.path[-1]] = part if item.form is None else item.form.write(part)
    return new


def raw_part(item: MMItem, *, named: bool = True) -> Part:
    """Return the item's media under the proxy's uuid, or without one if they are not `named`.

    A client's uuid is never passed on.
    """
    part = {key: value for key, value in item.part.items() if key != "uuid"}
    return {**part, "uuid": item.engine_name} if named and item.engine_name is not None else part


def metadata_part(item: MMItem, metadata: Mapping[str, Any], uuid: str) -> Part:
    """Return the item without its media: its encoder output's key, and placeholder metadata.

    Values are flat per item, such as `[t, h, w]` for `image_grid_thw`: vLLM stacks them. Fields of
    the part that the chat template may read are kept.
    """
    kind = f"{item.modality}_embeds"
    flat = {key: _flat(value) for key, value in metadata.items()}
    others = {key: value for key, value in item.part.items() if key != item.kind}
    return {**others, "type": kind, kind: flat, "uuid": uuid}


def _flat(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        return [number for row in value for number in row]
    return value


def check_mm_kwargs(body: Body) -> None:
    """Raise `BadRequest` if a field changes how media are processed, as vLLM does by default."""
    for field in MM_KWARGS:
        if body.get(field):
            raise BadRequest(
                f"{field} can change the cost of processing media; "
                "--trust-request-mm-kwargs of the proxy and of the instances allows it",
                slug="reserved_field",
                param=field,
            )


def feature_count(body: Body, item: MMItem) -> int:
    """Return the number of encoder outputs of an item: a video's sound has its own."""
    kwargs = body.get("mm_processor_kwargs")
    sound = isinstance(kwargs, dict) and bool(kwargs.get("use_audio_in_video"))
    return 2 if sound and item.modality == "video" else 1
