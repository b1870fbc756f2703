"""Media of megabytes, cut out of a body before it is parsed and put back where one is written.

A parser looks at each of their characters, makes a copy of them, and a writer another. Here they
stay where they came, and a body for an instance is made of pieces. Pure.

Where a text is cut, a mark is left in its place that no client can know or guess: to all else it is
a short string like any other, which ends up in bodies for instances wherever the text would.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

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
