"""Multipart forms: strict parsing of clients' forms, and writing of forms for instances. Pure.

The parser accepts the part of RFC 7578 that clients use and rejects the rest, so it needs only a
few searches of the body. After an incomplete boundary, general parsers step through the body in
Python: 2.5 MB of such boundaries block the event loop for a second.

A form for an instance is written from the parsed parts, with a boundary of the proxy's own. An
instance's parser therefore cannot find other fields than this parser, however it reads odd headers.
The content of a part is not copied.
"""

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from epd.api.body import Pieces
from epd.errors import BadRequest, RequestRefused

FORM = "multipart/form-data"

MAX_PARTS = 128
"""Upper bound of the parts of a form. vLLM knows about 30 fields."""

MAX_HEAD_BYTES = 4096
"""Upper bound of the headers of one part."""

MAX_FILENAME = 128
"""Maximum characters of a file name for an instance. The end, with its suffix, is kept."""

VALUE = r'"((?:[^"\\\x00-\x1f\x7f]|\\.)*)"|([^\s";]*)'
PARAMETER = re.compile(rf"[ \t]*;[ \t]*([A-Za-z0-9_*-]+)=(?:{VALUE})[ \t]*")
BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+")
UNSAFE = re.compile(r"[^A-Za-z0-9._ -]")
ESCAPED = re.compile(r"\\(.)")

END = (b"", b"\r\n", b"\r\n\r\n")
"""Valid data after the last boundary and its `--`."""


@dataclass(frozen=True, slots=True)
class FormPart:
    """Part of a form.

    Attributes:
        data: content; a view of the body, or bytes.
        filename: name of the file; None for a field that is not a file.
        media_type: the client's media type of a file; an empty string for none.
    """

    name: str
    data: bytes | memoryview
    filename: str | None = None
    media_type: str = ""

    def text(self) -> str:
        """Return the content of a field. Raise `BadRequest` if it is not UTF-8."""
        try:
            return bytes(self.data).decode()
        except UnicodeDecodeError:
            raise self.invalid("the field is not UTF-8") from None

    def invalid(self, message: str) -> BadRequest:
        return BadRequest(message, slug="invalid_form", param=self.name)


@dataclass(frozen=True, slots=True)
class MultipartForm:
    """A form for an instance.

    Attributes:
        boundary: separator of the parts. It is random, so no part contains it.
    """

    parts: tuple[FormPart, ...]
    boundary: str = field(default_factory=lambda: f"epd-{secrets.token_hex(16)}")

    @property
    def content_type(self) -> str:
        return f"{FORM}; boundary={self.boundary}"

    def pieces(self) -> Pieces:
        found: list[bytes | memoryview] = []
        for part in self.parts:
            found += f"--{self.boundary}\r\n{_head(part)}\r\n\r\n".encode(), part.data, b"\r\n"
        return (*found, f"--{self.boundary}--\r\n".encode())


def read_form(raw: bytes | bytearray, content_type: str) -> Iterator[FormPart]:
    """Yield the parts of a form, in order.

    Raises:
        RequestRefused: 415, the body is not a form.
        BadRequest: the form is malformed, or has too many parts.
    """
    whole = memoryview(raw)
    delimiter = f"\r\n--{_boundary(content_type)}".encode()
    if raw.startswith(delimiter):
        at = len(delimiter)
    elif raw.startswith(delimiter[2:]):
        at = len(delimiter) - 2
    else:
        raise _invalid("it does not begin with its boundary")
    for _ in range(MAX_PARTS):
        if raw[at : at + 2] != b"\r\n":
            break
        end = raw.find(delimiter, at)
        if end < 0:
            raise _invalid("its last boundary is missing")
        head_end = raw.find(b"\r\n\r\n", at, min(end, at + MAX_HEAD_BYTES))
        if head_end < 0:
            raise _invalid(f"a part has no headers, or more than {MAX_HEAD_BYTES} bytes of them")
        yield _part(bytes(whole[at + 2 : head_end]), whole[head_end + 4 : end])
        at = end + len(delimiter)
    if raw[at : at + 2] == b"\r\n":
        raise _invalid(f"it has more than {MAX_PARTS} parts")
    if raw[at : at + 2] != b"--" or raw[at + 2 : at + 7] not in END:
        raise _invalid("a boundary is not followed by a line break")


def _boundary(content_type: str) -> str:
    kind, parameters = _parsed_header(content_type)
    boundary = parameters.get("boundary", "")
    if kind != FORM or BOUNDARY.fullmatch(boundary) is None:
        raise RequestRefused(
            415, f"the body must be {FORM} with a boundary", slug="unsupported_media_type"
        )
    return boundary


def _part(head: bytes, data: memoryview) -> FormPart:
    headers: dict[str, str] = {}
    for line in head.decode("utf-8", "replace").split("\r\n"):
        header = HEADER.fullmatch(line)
        if header is None:
            raise _invalid("a part has a malformed header")
        name = header[1].lower()
        if name in headers:
            raise _invalid("a part has a header twice")
        headers[name] = header[2]
    kind, parameters = _parsed_header(headers.get("content-disposition", ""))
    if kind != "form-data" or "name" not in parameters:
        raise _invalid("a part has no Content-Disposition of form-data with a name")
    media_type = headers.get("content-type", "").partition(";")[0].strip()
    return FormPart(parameters["name"], data, parameters.get("filename"), media_type)


def _parsed_header(text: str) -> tuple[str, dict[str, str]]:
    """Return the value of a header in lower case, and its parameters; none if one is invalid."""
    kind = text.partition(";")[0]
    found: dict[str, str] = {}
    at = len(kind)
    while at < len(text):
        parameter = PARAMETER.match(text, at)
        if parameter is None or parameter[1].lower() in found:
            found = {}
            break
        quoted, token = parameter[2], parameter[3]
        found[parameter[1].lower()] = token if quoted is None else ESCAPED.sub(r"\1", quoted)
        at = parameter.end()
    return kind.strip().lower(), found


def _head(part: FormPart) -> str:
    """Return the headers of a part. Names need no escapes, because they are known ones."""
    disposition = f'Content-Disposition: form-data; name="{part.name}"'
    if part.filename is None:
        return disposition
    filename = UNSAFE.sub("_", part.filename)[-MAX_FILENAME:] or "file"
    head = f'{disposition}; filename="{filename}"'
    known = MEDIA_TYPE.fullmatch(part.media_type) is not None
    return f"{head}\r\nContent-Type: {part.media_type}" if known else head


def _invalid(why: str) -> BadRequest:
    return BadRequest(f"the form is malformed: {why}", slug="invalid_form")
