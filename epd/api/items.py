"""Media items: where they stand in a request, what a client may not write there. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from epd.errors import BadRequest

Body = Mapping[str, Any]
Part = Mapping[str, Any]
Path = tuple[str | int, ...]

MODALITY = {
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
"""Content part type of a picture in the responses API. vLLM takes it in a chat request too."""

EMBEDS = ("image_embeds", "audio_embeds", "video_embeds")
"""Parts that stand for an encoder output. The proxy writes them, a client must not: with an EC
consumer behind it, such a part reads whatever entry its `uuid` names."""

REASONING = ("reasoning", "reasoning_content")
"""Message fields that vLLM 0.33 reads like content, media parts and their uuids too."""

MM_KWARGS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that change what the encoder makes of an item, and so its key."""

UUID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What a client may call its media: bounded, and nothing that anyone would have to escape."""

REFUSED = (*EMBEDS, "image_pil", "prompt_embeds")
"""Parts that vLLM has and clients must not send, nor their keys in parts of other types, by which
vLLM may go. `prompt_embeds` is a serialized tensor, which no check of the proxy covers and which
prefill and decode would both load."""

_MARKED = frozenset({*MODALITY, *REFUSED, "uuid"})
"""Types and keys by which a content part is more than words."""


@dataclass(frozen=True, slots=True)
class Form:
    """How an API writes a media part, where that is not how chat does.

    Attributes:
        write: makes its part of a chat part.
        media: where in its part the media stand, as errors name it; empty: its part is them.
        named: whether its part can say by which key an encoder output is found.
    """

    write: Callable[[Part], Any]
    media: str
    named: bool


@dataclass(frozen=True, slots=True, eq=False)
class MMItem:
    """One media part of a request. Equal to itself only: the same picture twice is two items.

    Attributes:
        path: where it stands: keys and indices, from the body inwards.
        kind: the part's type, a key of `MODALITY`.
        part: the content part, as a chat request has it.
        form: how its request has it; None: so.
    """

    path: Path
    kind: str
    part: Part
    form: Form | None = None

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
        value = self.part.get(self.kind)
        if isinstance(value, dict):
            value = value.get("data" if self.kind == "input_audio" else "url")
        return bool(value) or self.uuid is None

    @property
    def remote(self) -> bool:
        """Whether its media are a URL that whoever processes the item has to fetch."""
        value = self.part.get(self.kind)
        url = value.get("url") if isinstance(value, dict) else None
        return isinstance(url, str) and url[:5].lower() != "data:"

    @property
    def named(self) -> bool:
        """Whether its request can say by which key its encoder output is found."""
        return self.form is None or self.form.named

    @property
    def param(self) -> str:
        """Where it stands, as errors name it, such as `messages[0].content[2]`."""
        return param(self.path)

    @property
    def media_param(self) -> str:
        """Where its media stand."""
        media = f"{self.kind}.url" if self.form is None else self.form.media
        return f"{self.param}.{media}" if media else self.param


def param(path: Path) -> str:
    """A place in a body, as errors name it."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join(steps).removeprefix(".")


def at_most(items: Iterable[MMItem], most: int | None) -> tuple[MMItem, ...]:
    """The items; what comes after one too many is not looked at.

    Raises:
        BadRequest: there are more than `most`, or one of them is wrong.
    """
    found: list[MMItem] = []
    for item in items:
        if len(found) == most:
            raise BadRequest(
                f"a request may have at most {most} media items",
                slug="too_many_items",
                param=param(item.path[:1]),
            )
        found.append(item)
    return tuple(found)


def chat_items(messages: list[Any], path: Path) -> Iterator[MMItem]:
    """The media parts of a conversation's messages, in order.

    Raises:
        BadRequest: a message or a content part has the wrong shape, or a part has an unknown type.
    """
    for index, message in enumerate(messages):
        content = check_message(message, path, index).get("content")
        if isinstance(content, list):
            yield from content_items(content, (*path, index, "content"))


def content_items(content: list[Any], path: Path) -> Iterator[MMItem]:
    """The media parts of one content, in order.

    Raises:
        BadRequest: a content part has the wrong shape, or an unknown type.
    """
    for position, part in enumerate(content):
        if isinstance(part, str) or _is_text(part):  # vLLM takes a string for text
            continue
        item = _media_item(part, (*path, position))
        if item is not None:
            yield item


def _media_item(part: Any, path: Path) -> MMItem | None:
    """The media item that a content part is; None for a part that is text.

    Its part is written as chat requests have it, whatever spelling of vLLM's the client uses.
    """
    if isinstance(part, dict):
        if "uuid" in part and part["uuid"] is None:
            part = {key: value for key, value in part.items() if key != "uuid"}
        kind = part.get("type")
        if kind is None:
            part = _with_type(part, path)
        elif kind == PICTURE:
            return MMItem(path, "image_url", picture_part(_with_url(part), path))
        elif "uuid" in part and isinstance(kind, str) and kind in MODALITY:
            part = {**part, kind: _as_object(kind, part.get(kind))}
    check_part(part, path)
    if part["type"] in MODALITY:
        return MMItem(path, part["type"], part)
    if part["type"] not in TEXTS:
        raise unknown_part(path, (*sorted(TEXTS), *MODALITY, PICTURE))
    return None


def _with_type(part: Part, path: Path) -> Part:
    """A content part without a type, with the type that vLLM takes it for by its keys."""
    for key in MODALITY:
        if key in part:
            return {**part, "type": key, key: _as_object(key, part[key])}
    if "tool_reference" in part:
        return {**part, "type": "tool_reference"}
    raise BadRequest("a content part must have a type", param=param(path))


def _as_object(kind: str, value: Any) -> Any:
    """A media part's value as chat has it, of a URL alone: so in parts with a uuid or no type."""
    return {"url": value} if isinstance(value, str) and kind != "input_audio" else value


def _with_url(part: Part) -> Part:
    """An `input_image` part with its URL as a string; vLLM takes an object too beside a uuid."""
    value = part.get("image_url")
    if part.get("uuid") is None or not isinstance(value, dict):
        return part
    return {**part, "image_url": value.get("url")}


def picture_part(part: Part, path: Path) -> Part:
    """An `input_image` part as a chat request has it.

    Raises:
        BadRequest: it has neither an `image_url` nor a `uuid`, or something else that it must not.
    """
    others = {key: value for key, value in part.items() if key not in {"image_url", "type"}}
    check_part({**others, "type": PICTURE}, path, kinds=(PICTURE,))
    uuid = {"uuid": part["uuid"]} if part.get("uuid") is not None else {}
    match part.get("image_url"):
        case None if uuid:
            return {"type": "image_url", **uuid}
        case str() as url if url:
            return {"type": "image_url", "image_url": {"url": url}, **uuid}
        case _:
            raise BadRequest(
                f'an {PICTURE} needs an "image_url" that is a string; files are not kept here',
                param=param((*path, "image_url")),
            )


def unknown_part(path: Path, known: Iterable[str]) -> BadRequest:
    """The error of a content part of a type that no check of the proxy covers."""
    return BadRequest(
        f"the type of this content part is not accepted; accepted types: {', '.join(known)}",
        slug="unknown_content_part",
        param=param((*path, "type")),
    )


def check_message(message: Any, path: Path, index: int) -> Mapping[str, Any]:
    """A message, or an item that vLLM takes for one.

    Raises:
        BadRequest: it is none, or has media where they would not be looked for.
    """
    if not isinstance(message, dict):
        raise BadRequest("a message must be an object", param=param((*path, index)))
    for field in REASONING:
        if not isinstance(message.get(field), str | None):
            raise BadRequest(f"{field} must be a string", param=param((*path, index, field)))
    return message


def _is_text(part: Any) -> bool:
    """Whether a part is text and needs no other check, as most parts of a long conversation."""
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return isinstance(kind, str) and kind in TEXTS and _MARKED.isdisjoint(part)


def check_part(part: Any, path: Path, kinds: Iterable[str] = MODALITY) -> None:
    """Refuse a content part that would be one thing here and another at an instance.

    Args:
        part: the part.
        path: where it stands.
        kinds: types of parts that may have a `uuid`.

    Raises:
        BadRequest: it is such a part, or none at all.
    """
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRequest("a content part must be an object with a type", param=param(path))
    for key in REFUSED:
        if key in part or part["type"] == key:
            raise BadRequest(
                f"{key} parts are not accepted from clients",
                slug="reserved_field",
                param=param(path),
            )
    if part.get("uuid") is not None and part["type"] not in kinds:
        raise BadRequest(
            "uuid belongs on media parts only", slug="reserved_field", param=param(path)
        )
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or UUID.fullmatch(uuid) is None):
        raise BadRequest("a uuid has 1 to 128 of A-Z a-z 0-9 . _ : -", param=param((*path, "uuid")))
    # vLLM goes by the keys of a part that has a uuid and by its type otherwise: a part where
    # they disagree would be one thing here and another there.
    for key in MODALITY:
        if key in part and part["type"] != key:
            raise BadRequest(f"a part with {key} must have the type {key}", param=param(path))


def with_parts(body: Body, parts: Mapping[MMItem, Part]) -> Body:
    """The body with other parts, as chat has them, in the places of these items."""
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


def raw_part(item: MMItem, uuid: str | None) -> Part:
    """The item's media under our own uuid; a client's never goes through."""
    part = {key: value for key, value in item.part.items() if key != "uuid"}
    return part if uuid is None else {**part, "uuid": uuid}


def metadata_part(item: MMItem, metadata: Mapping[str, Any], uuid: str) -> Part:
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
