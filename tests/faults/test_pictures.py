"""Pictures that an engine must not receive."""

import io
import json
import struct
import zlib
from typing import Any

import pytest
from PIL import Image

from tests.requests import audio_url, image, input_audio, request, text, video
from tests.support.fake_origin import ALLOWED, FakeOrigin
from tests.support.fleet import Fleet, Launch

pytestmark = pytest.mark.security("S10")

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def picture(kind: str, width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes that declares these dimensions."""
    header = b"IHDR" + struct.pack(">2L5B", width, height, 8, 2, 0, 0, 0)
    chunks = [header, b"IDAT" + zlib.compress(b"")]
    framed = [struct.pack(">L", len(c) - 4) + c + struct.pack(">L", zlib.crc32(c)) for c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


async def refused(fleet: Fleet, *parts: Any) -> str:
    """Return the error for the last part of a request; no instance may receive the request."""
    async with fleet.post(request(*parts)) as reply:
        error = (await reply.json())["error"]
        assert (reply.status, reply.headers["x-epd-error"]) == (400, "invalid_media")
    assert error["param"] == f"messages[0].content[{len(parts) - 1}]"
    assert fleet.e.calls == fleet.d.calls == []
    return str(error["message"])


@pytest.mark.parametrize("size", [(1, 1), (1, 640), (640, 1)])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_picture_of_one_pixel_is_refused(
    launch: Launch, kind: str, size: tuple[int, int]
) -> None:
    async with launch() as fleet:
        good = image(picture("PNG", 2, 2))
        said = await refused(fleet, text(), good, image(picture(kind, *size)))

        assert f"{size[0]} x {size[1]} pixels" in said


async def test_a_picture_of_no_pixel_is_refused(launch: Launch) -> None:
    async with launch() as fleet:
        assert "0 x 5 pixels" in await refused(fleet, image(bomb(0, 5)))


@pytest.mark.parametrize("size", [(13_378, 13_378), (60_000, 60_000), (2**31 - 1, 2)])
async def test_a_picture_that_would_be_gigabytes_is_refused_unopened(
    launch: Launch, size: tuple[int, int]
) -> None:
    async with launch() as fleet:
        assert "178956970" in await refused(fleet, image(bomb(*size)))


async def test_pictures_within_the_limits_are_served(launch: Launch) -> None:
    async with launch() as fleet:
        parts = [*(image(picture(kind, 2, 3)) for kind in KINDS), image(bomb(13_377, 13_377))]
        status, _ = await fleet.chat(request(*parts))

        assert status == 200
        assert len(fleet.e.calls) == len(parts)


async def test_the_limit_is_the_operators(launch: Launch) -> None:
    async with launch(max_image_pixels=100) as fleet:
        await refused(fleet, image(picture("PNG", 10, 11)))
        assert (await fleet.chat(request(image(picture("PNG", 10, 10)))))[0] == 200


@pytest.mark.fault(65)
async def test_one_bad_picture_among_large_ones_is_found(launch: Launch) -> None:
    """Pictures of this total size are validated off the event loop."""
    async with launch() as fleet:
        large = picture("BMP", 600, 600)
        said = await refused(fleet, image(large), image(large + b"x"), image(bomb(1, 1) + large))

        assert "1 x 1 pixels" in said


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,iVBORw0KGgo=",  # ends after the magic number
        "data:image/png;base64,not base64!",
        "data:image/png;base64,YWJj=YWJj",
        "data:image/png;base64,YWJjé",
        "data:text/plain;base64,iVBORw0KGgo=",  # an engine looks at the content too
    ],
)
async def test_a_picture_that_cannot_be_read_is_refused(launch: Launch, url: str) -> None:
    async with launch() as fleet:
        said = await refused(fleet, image(url))

        assert "cannot be read" in said
        assert "YWJj" not in said


async def test_an_unknown_picture_format_is_left_to_the_engine(launch: Launch) -> None:
    async with launch() as fleet:
        one = bomb(1, 1)
        parts = [image(b"\0\0\0\x1cftypavif"), audio_url(one), input_audio(one + b"x"), video()]
        assert (await fleet.chat(request(*parts)))[0] == 200
        assert len(fleet.e.calls) == len(parts)


async def test_a_picture_that_the_proxy_fetches_is_looked_into(launch: Launch) -> None:
    async with FakeOrigin(content=bomb(1, 1)).running() as origin, launch(**ALLOWED) as fleet:
        await refused(fleet, text(), image(origin.url))


async def test_a_rejected_picture_is_not_in_the_log(launch: Launch) -> None:
    async with launch() as fleet:
        await refused(fleet, image(bomb(1, 1)))

        [done] = fleet.events.requests
        assert done.error == "invalid_media"
        assert "base64" not in json.dumps(done.reason)
