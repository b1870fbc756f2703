"""The location of a media item's bytes, and the checks whether a request may use them."""

import binascii
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from epd.api.body import NO_CUTS, PLACEHOLDER_LENGTH, Cuts
from epd.api.items import MMItem
from epd.errors import BadRequest
from epd.media.image_header import Read, image_size

MIN_SIDE = 2
"""Minimum width and height of a picture, in pixels."""

MAX_DATA_URL_HEAD = 1024
"""Maximum length of the text before the comma of a data: URL, in characters."""

GROUP, GROUP_BYTES = 4, 3
"""Number of characters in a group of base64, and number of its bytes."""

FIRST_BYTES, WINDOW_BYTES = 64, 768
"""Number of a picture's bytes that are decoded first, and then at once. The size of most formats is
among the first ones, and that of a JPEG without EXIF among the next."""


FRAMES = "video/jpeg"
"""Media type of a video that is a list of pictures in base64."""


class Inline(NamedTuple):
    """Media inside the request.

    Attributes:
        media_type: the client's media type in lower case, such as `image/jpeg`.
        base64: the bytes as base64. A view avoids a copy of up to 100 MB.
    """

    media_type: str
    base64: bytes | memoryview

    def read(self, offset: int, size: int) -> bytes:
        """Return some of the bytes; fewer at their end. Raise `ValueError` if it is not base64."""
        first, end = offset // GROUP_BYTES, -(-(offset + size) // GROUP_BYTES)
        groups = self.base64[first * GROUP : end * GROUP]
        return binascii.a2b_base64(groups, strict_mode=True)[offset % GROUP_BYTES :][:size]


@dataclass(frozen=True, slots=True)
class Remote:
    """Media at an http, https or file URL, for the engines to fetch.

    The path of a file URL is subject to `check_inside`.
    """

    url: str
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """Media that the client has sent before, under this `uuid`."""

    uuid: str


def source(item: MMItem, cuts: Cuts = NO_CUTS) -> Inline | Remote | Known:
    """Return the location of an item's media. Raise `BadRequest` for none, or an invalid one."""
    if not item.has_media and item.uuid is not None:
        return Known(item.uuid)
    value = item.part.get(item.kind)
    if item.kind == "input_audio":
        return _input_audio(value, cuts, item.param_path)
    url = value.get("url") if isinstance(value, dict) else None
    if not isinstance(url, str) or not url:
        raise BadRequest(
            f'{item.kind} must be an object with a "url"', param=f"{item.param_path}.{item.kind}"
        )
    try:
        return _from_data_url(url, cuts) if url[:5].lower() == "data:" else _from_url(url)
    except BadRequest as error:
        raise error.at_param(item.media_param) from None


def check_inside(path: str, allowed: Path, param: str) -> None:
    """Raise `BadRequest` if a file is outside a folder. Blocks on the file system."""
    # Symlinks are resolved, so that none leads out of the folder.
    try:
        inside = allowed.resolve() in Path(path).resolve().parents
    except (OSError, RuntimeError):  # a loop of symlinks
        inside = False
    if not inside:
        raise BadRequest("the file is not under --allowed-local-media-path", param=param)


def inline_bytes(item: MMItem, cuts: Cuts) -> int:
    """Return the length of an item's base64 text in the request; 0 without one."""
    media = source(item, cuts)
    return len(media.base64) if isinstance(media, Inline) else 0


def check_image(media: Inline, *, max_pixels: int, min_side: int = MIN_SIDE) -> int:
    """Return the number of a picture's pixels by its header; 0 for an unknown format.

    A picture of one pixel has crashed engines (CVE-2026-22773), and a small file may have gigabytes
    of pixels. Unknown formats are left to the engine.

    Raises:
        BadRequest: the picture is too small, too large, or broken.
    """
    try:
        size = image_size(_header_reader(media))
    except ValueError as error:
        # The message of the base64 decoder describes its argument, not the picture.
        reason = "the data is not base64" if isinstance(error, binascii.Error) else str(error)
        raise _invalid(f"the image cannot be read: {reason}") from None
    if size is None:
        return 0
    width, height = size
    found = f"the image has {width} x {height} pixels"
    if min(size) < min_side:
        raise _invalid(f"{found}; each side needs at least {min_side}")
    if width * height > max_pixels:
        raise _invalid(f"{found}; at most {max_pixels} are allowed")
    return width * height


def _header_reader(media: Inline) -> Read:
    """Return a function that reads media, for many reads of a few bytes near each other."""
    start, window = 0, b""

    def read(offset: int, size: int) -> bytes:
        nonlocal start, window
        if offset < start or offset + size > start + len(window):
            window_bytes = WINDOW_BYTES if offset else FIRST_BYTES
            start, window = offset, media.read(offset, max(size, window_bytes))
        return window[offset - start :][:size]

    return read


def _invalid(message: str, param: str | None = None) -> BadRequest:
    return BadRequest(message, slug="invalid_media", param=param)


def _input_audio(value: Any, cuts: Cuts, param: str) -> Inline:
    match value:
        # vLLM writes both into a data: URL, where a comma would begin the base64.
        case {"data": str() as data} if data and "," not in str(value.get("format")):
            text = _base64(data, cuts, f"{param}.input_audio.data")
            return Inline(f"audio/{value.get('format')}".lower(), text)
        case _:
            raise BadRequest(
                'input_audio must be an object with "data", and a "format" without commas',
                param=f"{param}.input_audio",
            )


def _base64(text: str, cuts: Cuts, param: str | None = None) -> bytes | memoryview:
    found = cuts.get(text) if len(text) == PLACEHOLDER_LENGTH else None
    if found is not None:
        return found
    if "," in text:  # a data: URL in place of base64; a cut would cover only a part of it
        raise _invalid("the media are not base64", param)
    return text.encode()


def _from_url(url: str) -> Remote:
    # A difference between the parser here and the one in the engine could bypass a media policy
    # (CVE-2026-24779): a URL that two parsers could read differently is rejected.
    if "\\" in url or any(character <= " " or character == "\x7f" for character in url):
        raise BadRequest("the URL contains a character that must be percent-encoded")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadRequest("not a valid URL") from None
    if parts.scheme in {"http", "https"}:
        if not parts.hostname or "@" in parts.netloc:
            raise BadRequest("the URL must have a host, and no user")
        return Remote(url)
    if parts.scheme == "file":
        path = unquote(parts.path)
        if url[:8].lower() != "file:///" or parts.query or parts.fragment or "\0" in path:
            raise BadRequest("a file URL must have the form file:///absolute/path")
        return Remote(url, path)
    raise BadRequest("the URL must start with data:, https://, http:// or file://")


def _from_data_url(url: str, cuts: Cuts) -> Inline:
    comma = url.find(",", 5, 5 + MAX_DATA_URL_HEAD)
    # The form that vLLM accepts (`vllm/multimodal/media/connector.py`, `_load_data_url`):
    # parameters such as `codecs=opus` may be between the media type and `base64`.
    media_type, semicolon, encoding = url[5 : max(5, comma)].rpartition(";")
    if not semicolon or encoding != "base64":
        raise BadRequest("a data: URL must have the form data:<media type>;base64,<data>")
    kind, text = media_type.partition(";")[0].lower(), url[comma + 1 :]
    frames = kind == FRAMES and "," in text  # a comma is between two frames
    return Inline(kind, text.encode() if frames else _base64(text, cuts))
