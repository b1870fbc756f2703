"""Predicted work of a request, and the pixels of its pictures."""

import os
from typing import Any

import orjson
import pytest

import epd
from epd.api.body import WINDOW, cut_and_parsed, parse_object
from epd.api.endpoints import ENDPOINTS
from epd.api.items import MMItem
from epd.api.prompts import BYTES_PER_TOKEN
from epd.encoder_cache.keys import Keys
from epd.request.request import Request
from epd.request.request_media import media_work
from epd.routing.table import Work
from epd.tenants import ANONYMOUS
from epd.transfer.encoded import EncodedItem, OutputFacts
from tests.requests import Part, data_url, image, input_audio, png, request, video

CHAT = "/v1/chat/completions"
CONFIG = epd.ProxyConfig(encode_servers_urls=("http://e:1",), decode_servers_urls=("http://d:1",))
PICTURE = png(280, 280)


def item_of(part: Part) -> MMItem:
    [item] = ENDPOINTS[CHAT].items(request(part))
    return item


def work_of(*encoded: EncodedItem, text_bytes: int) -> Work:
    """Return the predicted work of a request with these items."""
    items = [one.item for one in encoded]
    return media_work(Request("r", {}, CONFIG, items=items, text_bytes=text_bytes), encoded)


def test_text_counts_by_its_bytes() -> None:
    assert work_of(text_bytes=4003) == (1000, 0)


@pytest.mark.parametrize(
    ("metadata", "tokens", "expected"),
    [
        ({"image_grid_thw": [1, 36, 54]}, 0, (586, 0)),
        ({}, 0, (1124, 0)),
        ({}, 70, (170, 70)),
    ],
    ids=["reported", "unknown", "left"],
)
def test_items_count_by_their_tokens_and_those_left_are_encoded_too(
    metadata: dict[str, Any], tokens: int, expected: tuple[int, int]
) -> None:
    item = item_of(image("http://x/a"))
    encoded = EncodedItem(item, OutputFacts(metadata=metadata), "local", tokens)

    assert work_of(encoded, text_bytes=400) == expected


def test_short_media_are_not_text() -> None:
    item = item_of(image(PICTURE))
    media = len(data_url(PICTURE).partition(",")[2])
    encoded = EncodedItem(item, OutputFacts(), "local", 10)

    assert work_of(encoded, text_bytes=400 + media) == (110, 10)


def test_media_that_were_cut_out_of_the_body_are_no_text() -> None:
    raw = orjson.dumps(request(image(os.urandom(WINDOW * 2))))
    body, cuts, text_bytes = cut_and_parsed(raw, parse_object, len(raw))
    [item] = ENDPOINTS[CHAT].items(body)
    encoded = EncodedItem(item, OutputFacts(), "local", 10)
    cut = Request("r", body, CONFIG, items=[item], cuts=cuts, text_bytes=text_bytes)

    assert cuts
    assert media_work(cut, [encoded]).prompt_tokens == text_bytes // BYTES_PER_TOKEN + 10


@pytest.mark.parametrize(
    ("part", "pixels"),
    [
        (image(PICTURE), 78_400),
        (image("http://x/a.png"), 0),
        (image(b"no picture"), 0),
        (video(PICTURE), 0),
        (input_audio(), 0),
    ],
)
async def test_pixels_are_those_of_a_pictures_header(part: Part, pixels: int) -> None:
    item = item_of(part)
    [keyed] = await Keys(None).keyed_items(request(part), [item], ANONYMOUS, CONFIG)

    assert keyed.pixels == pixels
