"""Picture sizes equal Pillow's, for any file."""

import base64
import io
import struct
import warnings
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, UnidentifiedImageError

from epd.errors import BadRequest
from epd.media.image_header import JPEG_WINDOW, MAX_STEPS, MAX_TAGS, Size, image_size
from epd.media.parts import Inline, check_image
from tests.examples import scaled

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def size_of(content: bytes) -> Size | None:
    return image_size(lambda offset, size: content[offset : offset + size])


def pillows(content: bytes) -> Size | None:
    """Return the size that an engine would see, or None if it could not open the picture."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=KINDS) as opened:
                return opened.size
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError):
        return None


@cache
def picture(kind: str, size: Size = (7, 5), **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind, **options)
    return file.getvalue()


def with_exif() -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription] = "x" * 60_000
    return picture("JPEG", exif=exif.tobytes())


def animated(kind: str) -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (7, 5), colour) for colour in ("red", "green")]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


WEBP_KINDS = [
    picture("WEBP"),
    picture("WEBP", lossless=True),
    picture("WEBP", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0"),
    animated("WEBP"),
]
PICTURES = [
    *map(picture, KINDS),
    *WEBP_KINDS,
    with_exif(),
    picture("JPEG", progressive=True),
    picture("TIFF", compression="tiff_lzw"),
    picture("TIFF", big_tiff=True),
    animated("PNG"),
    animated("GIF"),
    animated("TIFF"),
]


@pytest.mark.security("S10")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (1, 900), (640, 480), (3, 16_000)])
def test_a_pictures_size_is_found(kind: str, size: Size) -> None:
    assert size_of(picture(kind, size)) == size


@pytest.mark.security("S10")
@pytest.mark.parametrize("content", PICTURES, ids=lambda content: f"{content[:12]!r}")
def test_variants_of_a_kind_are_known(content: bytes) -> None:
    assert size_of(content) == pillows(content) == (7, 5)


@pytest.mark.parametrize(
    "content",
    [b"", b"picture", b"RIFF\0\0\0\0WAVEfmt ", b"P6 1 1 255\n\0\0\0", b"\0\0\0\x1cftypavif"],
)
def test_other_kinds_are_left_to_the_engine(content: bytes) -> None:
    assert size_of(content) is None


@pytest.mark.security("S10")
@pytest.mark.parametrize("content", PICTURES, ids=lambda content: f"{content[:12]!r}")
def test_a_picture_cut_anywhere_is_a_picture_or_refused(content: bytes) -> None:
    for end in range(16, min(len(content), 400)):
        try:
            found = size_of(content[:end])
        except ValueError:
            continue
        assert found == (7, 5)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return a picture with bytes replaced, inserted or removed."""
    content = bytearray(draw(st.sampled_from(PICTURES)))
    for _ in range(draw(st.integers(1, 3))):
        # Mostly near the start, where the headers are; a TIFF's may be at the end.
        at = draw(st.integers(0, min(64, len(content))) | st.integers(0, len(content)))
        width = draw(st.sampled_from([0, 1, 2, 4]))
        content[at : at + width] = draw(st.binary(max_size=4))
    return bytes(content)


@pytest.mark.security("S10")
@settings(max_examples=scaled(500))
@given(damaged())
@example(picture("PNG")[:33] + picture("PNG", (1, 1))[8:])
@example(picture("JPEG", (640, 480))[:-2] + picture("JPEG", (1, 1)))
def test_pictures_that_an_engine_opens_have_the_size_it_sees(content: bytes) -> None:
    """A file that two parsers read differently must not get past the limits."""
    try:
        found = size_of(content)
    except ValueError:
        return
    seen = pillows(content)
    if found is None or seen is None:
        return
    if content.startswith(b"GIF"):  # a frame may enlarge it
        assert all(mine <= engines for mine, engines in zip(found, seen, strict=True))
    else:
        assert sorted(found) == sorted(seen)  # TIFF may be rotated


@given(
    st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"II*\0", b"II+\0", b"BM", b"RIFF"]),
    st.binary(),
)
def test_any_bytes_have_a_size_or_are_refused(magic: bytes, rest: bytes) -> None:
    try:
        size = size_of(magic + rest)
    except ValueError:
        return
    assert size is None or all(side >= 0 for side in size)


@pytest.mark.security("S10")
@pytest.mark.parametrize(
    "endless",
    [
        b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0teXt\0\0\0\0" * 100,
        b"\xff\xd8\xff" + b"\xff" * MAX_STEPS * 2 * JPEG_WINDOW,
        b"\xff\xd8\xff\xfe\0\2" + b"\xff\xfe\0\2" * 100,
        b"II*\0\x08\0\0\0\xff\xff" + b"\0" * MAX_TAGS * 100,
        b"II+\0\x08\0\0\0\x10" + b"\0" * 7 + b"\xff" * 8 + b"\0" * MAX_TAGS * 100,
        b"II*\0\x08\0\0\0\0\4" + b"\0\1\4\0\1\0\0\0\7\0\0\0" * MAX_TAGS,
    ],
)
def test_a_header_without_end_is_given_up(endless: bytes) -> None:
    reads = 0

    def read(offset: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        return endless[offset : offset + size]

    with pytest.raises(ValueError, match=r"too long|too many tags|exactly one"):
        image_size(read)
    assert reads < 4 * MAX_STEPS


def segments(sizes: list[int]) -> bytes:
    """Return a JPEG with segments of these sizes before its first own one."""
    whole = picture("JPEG")
    return (
        whole[:2]
        + b"".join(struct.pack(">2sH", b"\xff\xe2", n) + b"x" * (n - 2) for n in sizes)
        + whole[2:]
    )


@pytest.mark.parametrize(
    "content",
    [
        segments([0xFFFF] * 255),
        segments([0xFFFF] * 600),
        segments([20] * 40),
        picture("JPEG", icc_profile=b"x" * 65519 * 200),
        picture("JPEG")[:20] + b"\0" * 10_000 + picture("JPEG")[20:],
        picture("JPEG")[:2] + b"\xff" * 10_001 + picture("JPEG")[2:],
    ],
    ids=["colour profile", "depth map", "metadata", "pillow", "zeros", "fill bytes"],
)
def test_a_picture_with_a_long_header_has_pillows_size(content: bytes) -> None:
    """A colour profile has up to 255 segments, a depth map in extended XMP has no limit."""
    assert size_of(content) == pillows(content) == (7, 5)


@pytest.mark.parametrize(
    ("content", "decodes"),
    [(picture("PNG"), 1), (picture("JPEG"), 2), (with_exif(), 2)],
    ids=["png", "jpeg", "60 KB before the size"],
)
def test_a_header_is_decoded_in_large_steps(content: bytes, decodes: int) -> None:
    reads: list[int] = []

    class Counted(Inline):
        def read(self, offset: int, size: int) -> bytes:
            reads.append(offset)
            return super().read(offset, size)

    media = Counted("image/x", base64.b64encode(content))

    assert check_image(media, min_side=1, max_pixels=35) == 35
    assert len(reads) == decodes


@pytest.mark.parametrize(("length", "is_refused"), [(76, True), (87, True), (88, False)])
def test_base64_with_line_breaks_is_refused_if_a_line_ends_in_the_header(
    length: int, *, is_refused: bool
) -> None:
    content = base64.b64encode(picture("PNG", (64, 64)) + bytes(700))
    lines = b"\n".join(content[at : at + length] for at in range(0, len(content), length))

    if is_refused:
        with pytest.raises(BadRequest, match="not base64"):
            check_image(Inline("image/png", lines), min_side=1, max_pixels=4096)
    else:
        assert check_image(Inline("image/png", lines), min_side=1, max_pixels=4096) == 4096


@given(content=st.binary(max_size=700) | st.sampled_from(PICTURES))
def test_a_picture_in_base64_has_the_size_of_its_bytes(content: bytes) -> None:
    def in_base64() -> int:
        media = Inline("image/x", base64.b64encode(content))
        return check_image(media, min_side=0, max_pixels=2**70)

    try:
        size = size_of(content)
    except ValueError:
        with pytest.raises(BadRequest):
            in_base64()
    else:
        assert in_base64() == (0 if size is None else size[0] * size[1])
