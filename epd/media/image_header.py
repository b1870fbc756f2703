"""The size of a picture from its header, without decompression and with few reads.

Engines open pictures with Pillow. Pillow itself would be too expensive here: to report a size it
reads a WebP to its end and allocates memory for its pixels, and it builds lists of any length that
a TIFF declares. This module parses the few bytes that Pillow uses. A file with ambiguous sizes, for
which two parsers could differ, is rejected.
"""

import re
import struct
from collections.abc import Callable
from itertools import count

Read = Callable[[int, int], bytes]
"""Returns bytes of a file by offset and size; fewer at its end."""

Size = tuple[int, int]

MAX_STEPS, STEP_BYTES = 64, 4096
"""Maximum number of segments or chunks to skip, plus one for each so many bytes before them. Real
files have tens of small ones. A colour profile or a depth map may have hundreds of 64 KB."""

MAX_TAGS = 1024
"""Maximum number of a TIFF's tags. They are read at once."""

TIFF_WIDTH, TIFF_HEIGHT = TIFF_SIZES = [256, 257]
TIFF_INTEGERS = {1: "B", 3: "H", 4: "L", 16: "Q"}
"""Format characters of `struct` for the valid types of a TIFF's width and height."""

JPEG_MARKER, JPEG_WINDOW = re.compile(rb"\xff[^\xff]"), 512
"""A marker in the padding between segments, and the number of bytes that are searched at once."""

JPEG_SCAN = 0xDA
JPEG_LARGEST = 0xFF
JPEG_LEAST = 0xC0
JPEG_FRAMES = frozenset({*range(0xC0, 0xD0), 0xDE}) - {0xC4, 0xC8, 0xCC}
"""Markers of segments that contain a size."""
JPEG_ALONE = frozenset({0x00, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
"""Markers without a segment, and the 0x00 that escapes a 0xFF."""

BMP_OLD, BMP_HEADERS = 12, frozenset({40, 52, 56, 64, 108, 124})
"""Valid sizes of a BMP's second header."""

PNG_ENDS = frozenset({b"IDAT", b"fdAT", b"IEND"})
"""Chunks after which no header follows."""


def image_size(read: Read) -> Size | None:
    """Return the width and height of a picture in pixels; None for an unknown format.

    For a GIF this is the canvas in its header; a frame may enlarge it.

    Raises:
        ValueError: the format is known, but the size is missing or ambiguous.
    """
    head = read(0, 32)
    for magic, size_of in KINDS.items():
        if head.startswith(magic):
            return size_of(read)
    return None


def _read_exactly(read: Read, offset: int, size: int) -> bytes:
    found = read(offset, size)
    if len(found) < size:
        raise ValueError("the file ends within its header")
    return found


def _numbers(layout: str, read: Read, offset: int) -> tuple[int, ...]:
    return struct.unpack(layout, _read_exactly(read, offset, struct.calcsize(layout)))


def _one(sizes: list[Size]) -> Size:
    if len(sizes) != 1:
        raise ValueError("the file does not have exactly one size")
    return sizes[0]


def _check_steps(steps: int, at: int) -> None:
    if steps > MAX_STEPS + at // STEP_BYTES:
        raise ValueError("the header is too long")


def _png(read: Read) -> Size:
    at, sizes = 8, list[Size]()
    for steps in count():
        _check_steps(steps, at)
        length, kind = struct.unpack(">L4s", _read_exactly(read, at, 8))
        if kind in PNG_ENDS:
            break
        if kind == b"IHDR":
            width, height = _numbers(">2L", read, at + 8)
            sizes.append((width, height))
        at += 12 + length
    return _one(sizes)


def _jpeg(read: Read) -> Size:
    at, sizes = 2, list[Size]()
    for steps in count():
        _check_steps(steps, at)
        begin, marker = _read_exactly(read, at, 2)
        if begin != JPEG_LARGEST or marker == JPEG_LARGEST:  # padding between segments
            at += _padding(read(at, JPEG_WINDOW))
        elif marker in JPEG_ALONE:
            at += 2
        elif marker == JPEG_SCAN:
            break
        elif marker < JPEG_LEAST:
            raise ValueError("the file has a segment that is not valid in JPEG")
        else:
            if marker in JPEG_FRAMES:
                height, width = _numbers(">2H", read, at + 5)
                sizes.append((width, height))
            [length] = _numbers(">H", read, at + 2)
            at += 2 + max(2, length)
    return _one(sizes)


def _padding(window: bytes) -> int:
    """Return the number of bytes before a marker, or before the last one, which may begin it."""
    marker = JPEG_MARKER.search(window)
    return len(window) - 1 if marker is None else marker.start()


def _gif(read: Read) -> Size:
    width, height = _numbers("<2H", read, 6)
    return width, height


def _bmp(read: Read) -> Size:
    [header] = _numbers("<L", read, 14)
    if header == BMP_OLD:
        width, height = _numbers("<2H", read, 18)
    elif header in BMP_HEADERS:
        width, height = _numbers("<Ll", read, 18)
    else:
        raise ValueError("the file is of an unknown kind of BMP")
    return width, abs(height)  # a negative height means rows from top to bottom


def _webp(read: Read) -> Size | None:
    head = read(0, 30)
    match head[8:12], head[12:16]:
        case b"WEBP", b"VP8X":
            width, low, high = _numbers("<LBH", read, 23)
            return (width >> 8) + 1, (high << 8 | low) + 1
        case b"WEBP", b"VP8L":
            [bits] = _numbers("<L", read, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"WEBP", b"VP8 ":
            width, height = _numbers("<2H", read, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"WEBP", _:
            raise ValueError("the file is of an unknown kind of WebP")
    return None  # RIFF is also a container of audio and video


def _tiff(read: Read) -> Size:
    order = "<" if read(0, 2) == b"II" else ">"
    big = read(2, 1) == b"+"
    [at] = _numbers(order + ("Q" if big else "L"), read, 8 if big else 4)
    [tags] = _numbers(order + ("Q" if big else "H"), read, at)
    if tags > MAX_TAGS:
        raise ValueError("the file has too many tags")
    at, entry = (at + 8, 20) if big else (at + 2, 12)
    heads = struct.iter_unpack(f"{order}2H{entry - 4}x", _read_exactly(read, at, tags * entry))
    sizes = [
        (tag, kind, at + n * entry + 4) for n, (tag, kind) in enumerate(heads) if tag in TIFF_SIZES
    ]
    if sorted(tag for tag, _, _ in sizes) != TIFF_SIZES:
        return _one([])
    found = {tag: _tiff_integer(order, kind, read, place, big=big) for tag, kind, place in sizes}
    return found[TIFF_WIDTH], found[TIFF_HEIGHT]


def _tiff_integer(order: str, kind: int, read: Read, at: int, *, big: bool) -> int:
    [length] = _numbers(order + ("Q" if big else "L"), read, at)
    if length != 1 or kind not in TIFF_INTEGERS or (kind == 16 and not big):  # noqa: PLR2004
        raise ValueError("the size in the file is not a number")
    [number] = _numbers(order + TIFF_INTEGERS[kind], read, at + (8 if big else 4))
    return number


def _odd_tiff(_: Read) -> Size:
    raise ValueError("the file is of an unknown kind of TIFF")


KINDS: dict[bytes, Callable[[Read], Size | None]] = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"\xff\xd8\xff": _jpeg,
    b"GIF87a": _gif,
    b"GIF89a": _gif,
    b"BM": _bmp,
    b"RIFF": _webp,
    b"II*\0": _tiff,
    b"MM\0*": _tiff,
    b"II+\0": _tiff,
    # Pillow reads these too, in its own way.
    b"MM*\0": _odd_tiff,
    b"II\0*": _odd_tiff,
    b"MM\0+": _odd_tiff,
}
"""The first bytes of each format, and the function that finds its size."""
