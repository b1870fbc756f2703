"""Pictures and conversations like those of VisionArena-Chat."""

import statistics
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from epd.tools.bench.pictures import (
    MAX_PIXELS,
    MIN_PIXELS,
    jpeg,
    question,
    rng,
    size,
)


@given(st.integers())
def test_a_picture_has_the_requested_size(seed: int) -> None:
    width, height = size(rng(seed))

    assert MIN_PIXELS * 0.99 <= width * height <= MAX_PIXELS
    assert 9 / 16.1 <= width / height <= 16.1 / 9


def test_pictures_spread_around_a_megapixel() -> None:
    areas = [width * height for width, height in (size(rng(seed)) for seed in range(2000))]

    assert statistics.median(areas) == pytest.approx(1e6, rel=0.05)
    tenths = statistics.quantiles(areas, n=10)
    assert tenths[0] < 0.7e6
    assert tenths[-1] > 1.5e6


def test_a_megapixel_jpeg_has_half_a_megabyte() -> None:
    contents = [jpeg(rng(seed)) for seed in range(10)]
    sizes = [Image.open(BytesIO(content)).size for content in contents]
    pixels = sum(width * height for width, height in sizes)

    assert sum(map(len, contents)) / pixels == pytest.approx(0.5, rel=0.1)


def test_a_seed_makes_the_same_picture_and_another_seed_another() -> None:
    assert jpeg(rng(1)) == jpeg(rng(1))
    assert jpeg(rng(1)) != jpeg(rng(2))


def test_hardly_two_questions_are_the_same() -> None:
    firsts = {question(rng(seed)) for seed in range(1000)}

    assert len(firsts) > 990
