"""Predicted tokens of media items."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.items import MMItem
from epd.request.item_tokens import LEAST_TOKENS, PIXELS_PER_TOKEN, TYPICAL_TOKENS, predict_tokens


def item(kind: str = "image_url", pixels: int = 0) -> MMItem:
    return MMItem(("messages", 0, "content", 0), kind, {"type": kind}, pixels=pixels)


def test_picture_has_the_tokens_of_qwen() -> None:
    assert predict_tokens(item(pixels=100 * PIXELS_PER_TOKEN)) == 100


@pytest.mark.parametrize(
    ("kind", "modality"),
    [("image_url", "image"), ("audio_url", "audio"), ("video_url", "video")],
)
def test_item_of_unknown_size_has_the_typical_tokens_of_its_modality(
    kind: str, modality: str
) -> None:
    assert predict_tokens(item(kind)) == TYPICAL_TOKENS[modality]


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_larger_picture_has_no_fewer_tokens(one: int, other: int) -> None:
    small, large = (predict_tokens(item(pixels=pixels)) for pixels in sorted((one, other)))

    assert LEAST_TOKENS <= small <= large
