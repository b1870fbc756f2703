"""Forms of clients: read strictly, and written anew for an instance. Pure.

The reader takes the part of RFC 7578 that clients send and refuses the rest, so it needs a few
searches of the body. General parsers step through it in Python where a boundary is begun and not
ended: 2.5 MB of that hold the event loop for a second.

What an instance is sent is written from what was read, under a boundary of the proxy's own. So an
instance's parser cannot find another field in a form than this reader did, whatever it makes of odd
headers. The content of a part is not copied.
"""

import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from epd.api.body import Pieces
from epd.errors import BadRequest, RequestRefused

FORM = "multipart/form-data"

MAX_PARTS = 128
"""Upper bound of the parts of a form. vLLM knows about 30 fields."""

MAX_HEAD_BYTES = 4096
"""Upper bound of the headers of one part."""

MAX_FILENAME = 128
"""Characters of a file's name that are passed on; the last ones, which have its suffix."""

VALUE = r'"((?:[^"\\\x00-\x1f\x7f]|\\.)*)"|([^\s";]*)'
PARAMETER = re.compile(rf"[ \t]*;[ \t]*([A-Za-z0-9_*-]+)=(?:{VALUE})[ \t]*")
BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+")
UNSAFE = re.compile(r"[^A-Za-z0-9._ -]")
ESCAPED = re.compile(r"\\(.)")

END = (b"", b"\r\n", b"\r\n\r\n")
"""What may follow the last boundary."""


@dataclass(frozen=True, slots=True)
class FormPart:
    """One part of a form.

    Attributes:
        name: the field's name.
        data: its content, where it is in the body.
        filename: the file's name; None for a field that is no file.
        media_type: what the client says that a file is; an empty string where it says nothing.
    """

    name: str
    data: bytes | memoryview
    filename: str | None = None
    media_type: str = ""

    def text(self) -> str:
        """Return the content of a field that is no file.

        Raises:
            BadRequest: it is not UTF-8.
        """
        try:
            return bytes(self.data).decode()
        except UnicodeDecodeError:
            raise BadRequest(
                "the field is not UTF-8", slug="invalid_form", param=self.name
            ) from None


@dataclass(frozen=True, slots=True)
class MultipartForm:
    """A form as an instance is sent it.

    Attributes:
        parts: its parts, in order.
        boundary: what separates them. It is random, so no part has it.
    """

    parts: tuple[FormPart, ...]
    boundary: str

    @property
    def content_type(self) -> str:
        """The form's media type, with its boundary."""
        return f"{FORM}; boundary={self.boundary}"

    def pieces(self) -> Pieces:
        """Return the body, one piece after the other."""
        found: list[bytes | memoryview] = []
        for part in self.parts:
            found += f"--{self.boundary}\r\n{_head(part)}\r\n\r\n".encode(), part.data, b"\r\n"
        return (*found, f"--{self.boundary}--\r\n".encode())


def new_form(parts: Iterable[FormPart]) -> MultipartForm:
    """Make a form of these parts."""
    return MultipartForm(tuple(parts), f"epd-{secrets.token_hex(16)}")


def read_form(raw: bytes | bytearray, content_type: str) -> Iterator[FormPart]:
    """Find the parts of a form, in order.

    Args:
        raw: the body.
        content_type: its media type as the client sent it, with the boundary.

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
        raise _invalid("a boundary is followed by something else than a line's end")


def _boundary(content_type: str) -> str:
    kind, _, _ = content_type.partition(";")
    parameters = _parameters(content_type[len(kind) :])
    boundary = "" if parameters is None else parameters.get("boundary", "")
    if kind.strip().lower() != FORM or BOUNDARY.fullmatch(boundary) is None:
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
    kind, _, _ = headers.get("content-disposition", "").partition(";")
    parameters = _parameters(headers.get("content-disposition", "")[len(kind) :])
    if kind.strip().lower() != "form-data" or parameters is None or "name" not in parameters:
        raise _invalid("a part has no Content-Disposition of form-data with a name")
    media_type = headers.get("content-type", "").partition(";")[0].strip()
    return FormPart(parameters["name"], data, parameters.get("filename"), media_type)


def _parameters(text: str) -> dict[str, str] | None:
    """The parameters of a header; None where they are malformed or one comes twice."""
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        parameter = PARAMETER.match(text, at)
        if parameter is None or parameter[1].lower() in found:
            return None
        quoted, token = parameter[2], parameter[3]
        found[parameter[1].lower()] = token if quoted is None else ESCAPED.sub(r"\1", quoted)
        at = parameter.end()
    return found


def _head(part: FormPart) -> str:
    """The headers of a part. Nothing in them needs an escape: names are known ones."""
    disposition = f'Content-Disposition: form-data; name="{part.name}"'
    if part.filename is None:
        return disposition
    filename = UNSAFE.sub("_", part.filename)[-MAX_FILENAME:] or "file"
    head = f'{disposition}; filename="{filename}"'
    known = MEDIA_TYPE.fullmatch(part.media_type) is not None
    return f"{head}\r\nContent-Type: {part.media_type}" if known else head


def _invalid(why: str) -> BadRequest:
    return BadRequest(f"the form is malformed: {why}", slug="invalid_form")
