"""JSON of clients, read within limits, its media cut out. Pure.

Media of megabytes, cut out of a body before it is parsed and put back where one is written.

A parser looks at each of their characters, makes a copy of them, and a writer another. Here they
stay where they came, and a body for an instance is made of pieces. Pure.

Where a text is cut, a mark is left in its place that no client can know or guess: to all else it is
a short string like any other, which ends up in bodies for instances wherever the text would.
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
"""Bytes without a quotation mark that tell of a long string. One of twice that is always found."""

MAX_HEAD = 1024
"""Bytes before the comma of a data: URL, or before a text under "data" in which its key stands."""

BEGINS = re.compile(rb'data:[^"\\,]*;base64,|(?<="data":")|(?<="data": ")', re.IGNORECASE)
"""What a long string begins with that is cut behind it: base64, as a URL or as input_audio."""

KEY = re.compile(rb'"[ \t\r\n]*:')
"""How a string ends that is the key of an object."""

TOKEN_BYTES = 16
NUMBER_DIGITS = 6
MARK_LENGTH = 1 + 2 * TOKEN_BYTES + NUMBER_DIGITS

Cuts = Mapping[str, memoryview]
"""What was cut out of a body, by the marks left in its place."""

Pieces = Sequence[bytes | memoryview]
"""A body as it is sent: one piece after the other."""

NO_CUTS: Cuts = MappingProxyType({})


def cut(raw: bytes | bytearray) -> tuple[bytes | bytearray, Cuts]:
    """A body without its media, and these.

    What remains is JSON exactly where the body is: nothing that is cut has a quotation mark or a
    backslash, so it begins and ends in one string, or is in none, as a mark would. Whether all of
    its characters may stand in a string is left to the engines, which read it strictly.
    """
    if len(raw) <= WINDOW:
        return raw, NO_CUTS
    token = _token()
    whole, kept, cuts, end = memoryview(raw), list[bytes | memoryview](), dict[str, memoryview](), 0
    for start, stop in _media(raw):
        mark = f"{token}{len(cuts):0{NUMBER_DIGITS}}"
        cuts[mark] = whole[start:stop]
        kept += whole[end:start], mark.encode()
        end = stop
    if not cuts:
        return raw, NO_CUTS
    return b"".join((*kept, whole[end:])), cuts


def joined(cuts: Cuts, texts: Sequence[memoryview]) -> tuple[Cuts, list[str]]:
    """Cut out texts that are to be in a body too; return all cuts, and the marks of these.

    Args:
        cuts: what was cut out of the body.
        texts: base64.
    """
    token = next(iter(cuts))[:-NUMBER_DIGITS] if cuts else _token()
    marks = [f"{token}{len(cuts) + index:0{NUMBER_DIGITS}}" for index in range(len(texts))]
    return {**cuts, **dict(zip(marks, texts, strict=True))}, marks


def _token() -> str:
    return "@" + secrets.token_hex(TOKEN_BYTES)


def _media(raw: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Where in a body long texts begin and end."""
    at = 0
    while at + WINDOW <= len(raw):
        # What has quotation marks is passed by windows, what has none by strings.
        if raw.find(b'"', at, at + WINDOW) >= 0:
            at += WINDOW
            continue
        first, stop = raw.rfind(b'"', 0, at) + 1, raw.find(b'"', at)
        if stop < 0:
            return
        begins = BEGINS.match(raw, first, first + MAX_HEAD)
        if begins and raw.find(b"\\", begins.end(), stop) < 0 and not KEY.match(raw, stop):
            yield begins.end(), stop
        at = stop


def pieces(written: bytes, cuts: Cuts) -> Pieces:
    """A body that was written, with what was cut out in the places of the marks."""
    if not cuts:
        return (written,)
    token = next(iter(cuts))[:-NUMBER_DIGITS].encode()
    first, *others = written.split(token)
    found: list[bytes | memoryview] = [first]
    for part in others:
        number, rest = part[:NUMBER_DIGITS], part[NUMBER_DIGITS:]
        found += cuts[(token + number).decode()], rest
    return found


T = TypeVar("T")

JSON = "application/json"
JSON_TYPE = re.compile(r"application/[a-z0-9!#$&^_.-]+\+json")

MAX_DEPTH = 128
"""Levels of a body. orjson reads 1024 of them and writes 254, so what it has read it might not be
able to write; and other parsers recurse."""

MAX_VALUES = 200_000
"""Values in a body: enough for a bias of every token of a vocabulary. Small values take many times
their bytes of memory, and time in which nothing else runs."""

MAX_CONTAINERS = 50_000
"""Lists and objects in a body: ten thousand messages of several parts. They cost most: an empty
object is two bytes of JSON and over 64 of memory, and the garbage collector looks at each."""


DIGITS = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))
LONG = b"0" * 19
"""Digits of the shortest integer that has more than 64 bits, by the table `DIGITS`."""


def check_json_type(content_type: str) -> None:
    """Refuse a body that its client does not call JSON, as vLLM does.

    A web page of another origin can send any body as `text/plain` without the browser asking first.

    Args:
        content_type: the body's media type as the client sent it; an empty string for none.

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
) -> tuple[T, Cuts]:
    """What a body says, and the media that were cut out of it.

    Args:
        raw: the body.
        parse: reads a body from which media were cut.
        max_text_bytes: most that is parsed. Nothing else runs meanwhile, and a thread would not
            help: the parser holds the GIL.

    Raises:
        RequestRefused: 413, more is left than that once the media are cut out.
        BadRequest: `parse` does, and says where in all of the body the error is, unless that is
            larger than `max_text_bytes`.
    """
    rest, cuts = cut(raw)
    if len(rest) > max_text_bytes:
        raise RequestRefused(
            413,
            f"the body has more than {max_text_bytes} bytes beside its media, which are data: URLs "
            "in base64 and input_audio without backslashes",
            slug="text_too_large",
        )
    try:
        return parse(rest), cuts
    except BadRequest:
        if not cuts or len(raw) > max_text_bytes:
            raise
        return parse(raw), NO_CUTS


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """The object in a body.

    Raises:
        BadRequest: not JSON, too much of it, or something else.
    """
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


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
        if LONG in raw.translate(DIGITS):  # orjson makes a float of an integer beyond 64 bits
            value = json.loads(raw)
    finally:
        if collects:
            gc.enable()
    return value


def dumped(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return a value that was parsed as JSON."""
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


def reply_field(reply: bytes, name: str, *, stage: Stage) -> dict[str, Any]:
    """A field of an instance's reply that is an object; empty where there is none.

    Raises:
        UpstreamFailed: the reply is no JSON, or the field is no object.
    """
    parsed = json_or_none(reply)
    value = parsed.get(name) if isinstance(parsed, dict) else ...
    if value is None:
        return {}
    if not isinstance(value, dict) or (may_be_deep(reply) and deeper(value, MAX_DEPTH)):
        raise UpstreamFailed(
            f"the {stage} instance's answer is not what vLLM sends",
            slug=f"{stage}_bad_response",
            stage=stage,
        )
    return value
