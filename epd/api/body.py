"""JSON bodies: parsing of clients' bodies within limits, with their media cut out. Pure.

Media of megabytes are cut out of a body before it is parsed, and put back when a body is written. A
parser would read each of their characters and copy them, and a writer would copy them again.
Instead they stay in the received buffer, and a body for an instance is a list of pieces. Media that
the client has written with escapes, such as a slash after a backslash, are copied without them.

A random placeholder, which no client can know or guess, replaces each cut text. For all other code
the placeholder is a short string, which moves to bodies for instances in the place of the text.
"""

import gc
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import orjson

from epd.errors import BadRequest, RequestRefused, Stage, UpstreamFailed
from epd.json_or_none import json_or_none

WINDOW = 16 * 1024
"""Bytes without a quotation mark that indicate a long string; twice as many are always found."""

MAX_HEAD = 1024
"""Maximum bytes of a data: URL up to its comma."""

MAX_KEY = 64
"""Maximum bytes of the key before a text under "data", with the white space around its colon."""

URL_HEAD = re.compile(rb'data:[^"\\,]*(?:\\(?:/|u002[bf]|u003d)[^"\\,]*)*;base64,', re.IGNORECASE)
"""Beginning of a data: URL in base64. Some clients escape its `/`, `+` and `=`."""

DATA_KEY = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*"\Z')
"""Key before base64 alone, as in input_audio."""

KEY = re.compile(rb'"[ \t\r\n]*:')
"""End of a string that is the key of an object."""

TOKEN_BYTES = 16
NUMBER_DIGITS = 6
PLACEHOLDER_LENGTH = 1 + 2 * TOKEN_BYTES + NUMBER_DIGITS

Cuts = Mapping[str, memoryview]
"""Texts cut out of a body, by the placeholders in their places."""

Pieces = Sequence[bytes | memoryview]
"""A body to be sent: one piece after the other."""

NO_CUTS: Cuts = MappingProxyType({})

JSON = "application/json"
JSON_TYPE = re.compile(r"application/[a-z0-9!#$&^_.-]+\+json")

MAX_DEPTH = 128
"""Maximum nesting of a body. orjson reads 1024 levels but writes only 254, so it could not write
every body that it has read. Other parsers recurse."""

MAX_VALUES = 200_000
"""Maximum number of values in a body: enough for a bias of every token of a vocabulary. Small
values take many times their size in memory, and parsing them blocks the event loop."""

MAX_CONTAINERS = 50_000
"""Maximum number of lists and objects in a body: ten thousand messages of several parts. They cost
most: an empty object has two bytes of JSON and takes over 64 bytes of memory, and the garbage
collector visits each."""

DIGITS = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))
LONG = b"0" * 19
"""Digits of the shortest integer that has more than 64 bits, translated by `DIGITS`."""

T = TypeVar("T")


def cut_media(raw: bytes | bytearray) -> tuple[bytes | bytearray, Cuts]:
    """Return a body without its media, and the media.

    The rest is valid JSON exactly if the body is: a cut text has no quotation mark, and no
    backslash but those of whole escapes, so it lies within one string, or outside all strings, as
    its placeholder does. The proxy does not check that all of its characters may be in a string:
    engines parse base64 strictly.
    """
    if len(raw) <= WINDOW:
        return raw, NO_CUTS
    token = _token()
    whole, parts, cuts, end = (
        memoryview(raw),
        list[bytes | memoryview](),
        dict[str, memoryview](),
        0,
    )
    for start, stop in _media(raw):
        escaped = raw.find(b"\\", start, stop) >= 0
        text = _unescaped(whole[start:stop]) if escaped else whole[start:stop]
        if text is None:
            continue
        placeholder = f"{token}{len(cuts):0{NUMBER_DIGITS}}"
        cuts[placeholder] = text
        parts += whole[end:start], placeholder.encode()
        end = stop
    if not cuts:
        return raw, NO_CUTS
    return b"".join((*parts, whole[end:])), cuts


def join_cuts(cuts: Cuts, texts: Sequence[memoryview]) -> tuple[Cuts, list[str]]:
    """Add texts to the cuts of a body. Return all cuts, and the placeholders of the added texts."""
    token = next(iter(cuts))[:-NUMBER_DIGITS] if cuts else _token()
    placeholders = [f"{token}{len(cuts) + index:0{NUMBER_DIGITS}}" for index in range(len(texts))]
    return {**cuts, **dict(zip(placeholders, texts, strict=True))}, placeholders


def _token() -> str:
    return "@" + secrets.token_hex(TOKEN_BYTES)


def _media(raw: bytes | bytearray) -> Iterator[tuple[int, int]]:
    at = 0
    while at + WINDOW <= len(raw):
        # Text with quotation marks is skipped by windows, text without them by strings.
        if raw.find(b'"', at, at + WINDOW) >= 0:
            at += WINDOW
            continue
        first, stop = raw.rfind(b'"', 0, at) + 1, raw.find(b'"', at)
        if stop < 0:
            return
        begins = URL_HEAD.match(raw, first, first + MAX_HEAD)
        found = begins or DATA_KEY.search(raw, max(0, first - MAX_KEY), first)
        if found and not KEY.match(raw, stop):
            yield found.end(), stop
        at = stop


def _unescaped(text: memoryview) -> memoryview | None:
    """Return the text of a JSON string without escapes; None if it is not text that needs none.

    The parser takes 2 ms for each MB on a slow core, a third of the time of a regular expression.
    """
    try:
        written = orjson.dumps(orjson.loads(b"".join((b'"', text, b'"'))))
    except orjson.JSONDecodeError:
        return None
    return None if b"\\" in written else memoryview(written)[1:-1]


def pieces(written: bytes, cuts: Cuts) -> Pieces:
    """Return a written body, with the cut texts in the places of their placeholders."""
    if not cuts:
        return (written,)
    token = next(iter(cuts))[:-NUMBER_DIGITS].encode()
    first, *others = written.split(token)
    found: list[bytes | memoryview] = [first]
    for part in others:
        number, rest = part[:NUMBER_DIGITS], part[NUMBER_DIGITS:]
        found += cuts[(token + number).decode()], rest
    return found


def check_json_type(content_type: str) -> None:
    """Reject a body without the media type of JSON, as vLLM does.

    A web page of another origin can send any body as `text/plain`, and the browser sends no
    preflight request.

    Raises:
        RequestRefused: 415, it is neither `application/json` nor a type that ends in `+json`.
    """
    if content_type == JSON:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind != JSON and JSON_TYPE.fullmatch(kind) is None:
        raise RequestRefused(
            415, f"the body must have the Content-Type {JSON}", slug="unsupported_media_type"
        )


def cut_and_parsed(
    raw: bytes | bytearray, parse: Callable[[bytes | bytearray], T], max_text_bytes: int
) -> tuple[T, Cuts, int]:
    """Return the parsed value of a body, the media that were cut out of it, and the rest's size.

    The text is limited because parsing blocks the event loop, and a thread would not help: the
    parser holds the GIL.

    Raises:
        RequestRefused: 413, the body without its media is larger than `max_text_bytes`.
        BadRequest: `parse` failed. The position in the message refers to the whole body, unless
            the body is larger than `max_text_bytes`.
    """
    rest, cuts = cut_media(raw)
    if len(rest) > max_text_bytes:
        raise RequestRefused(
            413,
            f"the body has more than {max_text_bytes} bytes without its media, which are data: "
            "URLs in base64 and input_audio",
            slug="text_too_large",
        )
    try:
        return parse(rest), cuts, len(rest) - PLACEHOLDER_LENGTH * len(cuts)
    except BadRequest:
        if not cuts or len(raw) > max_text_bytes:
            raise
        return parse(raw), NO_CUTS, len(raw)


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the object in a JSON body.

    Raises:
        BadRequest: the body is not JSON, exceeds a limit, or is not an object.
    """
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def parse_json(
    raw: bytes | bytearray,
    *,
    max_containers: int = MAX_CONTAINERS,
    max_values: int = MAX_VALUES,
) -> Any:
    """Return the value in a JSON body. Raise `BadRequest` if it is invalid or exceeds a limit."""

    def has_too_many(json: bytes | bytearray) -> bool:
        # Each value but the first follows a comma or a bracket.
        if len(json) <= max_containers:
            return False
        containers = json.count(b"[") + json.count(b"{")
        return containers > max_containers or containers + json.count(b",") >= max_values

    # Before memory is allocated for the values. Text may contain commas and brackets too: if there
    # are many, those in strings do not count.
    if has_too_many(raw) and has_too_many(_without_strings(raw, max_values)):
        raise BadRequest(
            f"the body has more than {max_containers} lists and objects or {max_values} values",
            slug="invalid_json",
        )
    # Garbage collection would visit all parsed values several times, and free nothing.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = _loads(raw)
        if _is_too_deep(value, raw):
            raise BadRequest(
                f"the body is nested deeper than {MAX_DEPTH} levels", slug="invalid_json"
            )
        if LONG in raw.translate(DIGITS):  # orjson makes a float of an integer beyond 64 bits
            value = json.loads(raw)
    finally:
        if collects:
            gc.enable()
    return value


def dump_json(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return the JSON of a parsed value."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except orjson.JSONEncodeError:  # of an integer beyond 64 bits
        written = json.dumps(value, separators=(",", ":"), ensure_ascii=False, sort_keys=sort_keys)
        return written.encode()


def _loads(raw: bytes | bytearray) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(
            f"the body is not valid JSON: {error.msg} at character {error.pos}", slug="invalid_json"
        ) from None


def _without_strings(raw: bytes | bytearray, max_values: int) -> bytes:
    """Return JSON without the contents of its strings.

    A value has at most four quotation marks, including those of its key. Text after the maximum
    number of marks stays unchanged: a body of only quotation marks would become too many pieces.
    """
    quotes = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    pieces = quotes.split(b'"', 4 * max_values)
    return b"".join(pieces[::2])


def _is_too_deep(value: Any, raw: bytes | bytearray) -> bool:
    """Return whether the value of a body is nested deeper than `MAX_DEPTH`, without recursion."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (list, dict))  # a union would take twice as long
        ]
    return bool(level)


def reply_field(reply: bytes, name: str, *, stage: Stage) -> dict[str, Any]:
    """Return an object in a field of an instance's reply; empty if the field is missing.

    Raises:
        UpstreamFailed: the reply is not JSON, or the field is not an object.
    """
    parsed = json_or_none(reply)
    value = parsed.get(name) if isinstance(parsed, dict) else ...
    if value is None:
        return {}
    if not isinstance(value, dict) or _is_too_deep(value, reply):
        raise UpstreamFailed(
            f"the {stage} instance's reply is not in vLLM's format",
            slug=f"{stage}_bad_response",
            stage=stage,
        )
    return value
