"""How large a picture is, from its header alone: nothing is decompressed, little is read.

Engines open pictures with Pillow. It would be the parser to ask here too, were it lazier: for a
size it reads a WebP to its end and sets aside memory for its pixels, and makes lists as long as a
TIFF says. So these are the few bytes that Pillow goes by; where a file says something twice, and
two parsers could differ, it is refused.
"""

import struct
from collections.abc import Callable

Read = Callable[[int, int], bytes]
"""Bytes of a file by offset and size; fewer where it ends."""

Size = tuple[int, int]

MAX_STEPS = 1024
"""Segments, chunks or tags that are gone past at most: files as they are have tens of them."""

TIFF_WIDTH, TIFF_HEIGHT = 256, 257
TIFF_INTEGERS = {1: "B", 3: "H", 4: "L", 16: "Q"}
"""struct's letters for the types that a TIFF's width and height may have."""

JPEG_SCAN = 0xDA
JPEG_LARGEST = 0xFF
JPEG_LEAST = 0xC0
JPEG_FRAMES = frozenset({*range(0xC0, 0xD0), 0xDE}) - {0xC4, 0xC8, 0xCC}
"""Markers of segments that hold a size."""
JPEG_ALONE = frozenset({0x00, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
"""Markers that no segment follows, and the 0x00 that makes 0xFF no marker."""

BMP_OLD, BMP_HEADERS = 12, frozenset({40, 52, 56, 64, 108, 124})
"""Sizes of a BMP's second header."""

PNG_ENDS = frozenset({b"IDAT", b"fdAT", b"IEND"})
"""Chunks behind which no header comes."""


def image_size(read: Read) -> Size | None:
    """Width and height of a picture in pixels; None where it is of no kind known here.

    Of a GIF it is the canvas that its header names; a frame may make it larger.

    Raises:
        ValueError: it is of a known kind, and no parser would find one size in it.
    """
    head = read(0, 32)
    for magic, size_of in KINDS.items():
        if head.startswith(magic):
            return size_of(read)
    return None


def _exactly(read: Read, offset: int, size: int) -> bytes:
    found = read(offset, size)
    if len(found) < size:
        raise ValueError("it ends within its header")
    return found


def _numbers(layout: str, read: Read, offset: int) -> tuple[int, ...]:
    return struct.unpack(layout, _exactly(read, offset, struct.calcsize(layout)))


def _one(sizes: list[Size]) -> Size:
    if len(sizes) != 1:
        raise ValueError("it does not have one size")
    return sizes[0]


def _png(read: Read) -> Size:
    at, sizes = 8, list[Size]()
    for _ in range(MAX_STEPS):
        length, kind = struct.unpack(">L4s", _exactly(read, at, 8))
        if kind in PNG_ENDS:
            return _one(sizes)
        if kind == b"IHDR":
            width, height = _numbers(">2L", read, at + 8)
            sizes.append((width, height))
        at += 12 + length
    raise ValueError("its header does not end")


def _jpeg(read: Read) -> Size:
    at, sizes = 2, list[Size]()
    for _ in range(MAX_STEPS):
        begin, marker = _exactly(read, at, 2)
        if begin != JPEG_LARGEST or marker == JPEG_LARGEST:  # what fills the space between segments
            at += 1
        elif marker in JPEG_ALONE:
            at += 2
        elif marker == JPEG_SCAN:
            return _one(sizes)
        elif marker < JPEG_LEAST:
            raise ValueError("it has a segment that JPEG does not know")
        else:
            if marker in JPEG_FRAMES:
                height, width = _numbers(">2H", read, at + 5)
                sizes.append((width, height))
            [length] = _numbers(">H", read, at + 2)
            at += 2 + max(2, length)
    raise ValueError("its header does not end")


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
        raise ValueError("it is of a BMP that is not known")
    return width, abs(height)  # from the top where it is negative


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
            raise ValueError("it is of a WebP that is not known")
    return None  # RIFF is of sounds and films too


def _tiff(read: Read) -> Size:
    order = "<" if read(0, 2) == b"II" else ">"
    big = read(2, 1) == b"+"
    [at] = _numbers(order + ("Q" if big else "L"), read, 8 if big else 4)
    [count] = _numbers(order + ("Q" if big else "H"), read, at)
    if count > MAX_STEPS:
        raise ValueError("it has too many tags")
    at, entry = (at + 8, 20) if big else (at + 2, 12)
    found: dict[int, list[int]] = {TIFF_WIDTH: [], TIFF_HEIGHT: []}
    for place in range(at, at + count * entry, entry):
        tag, kind = _numbers(order + "2H", read, place)
        if tag in found:
            found[tag].append(_tiff_integer(order, kind, read, place + 4, big=big))
    return _one(list(zip(*found.values(), strict=True)))


def _tiff_integer(order: str, kind: int, read: Read, at: int, *, big: bool) -> int:
    [count] = _numbers(order + ("Q" if big else "L"), read, at)
    if count != 1 or kind not in TIFF_INTEGERS or (kind == 16 and not big):  # noqa: PLR2004
        raise ValueError("its size is not a number")
    [number] = _numbers(order + TIFF_INTEGERS[kind], read, at + (8 if big else 4))
    return number


def _odd_tiff(_: Read) -> Size:
    raise ValueError("it is of a TIFF that is not known")


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
    # Which Pillow reads as well, in a way of its own.
    b"MM*\0": _odd_tiff,
    b"II\0*": _odd_tiff,
    b"MM\0+": _odd_tiff,
}
"""What a file of each kind begins with, and who finds its size."""
