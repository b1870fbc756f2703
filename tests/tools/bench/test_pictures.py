"""Pictures and conversations like those of VisionArena-Chat."""

import statistics
from base64 import b64decode
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from epd.tools.bench.dataset import (
    MAX_PIXELS,
    MIN_PIXELS,
    jpeg,
    question,
    rng,
    size,
    vision_arena,
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


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
def test_conversations_of_the_hub_become_requests(tmp_path: Path) -> None:
    """A folder in the schema of VisionArena-Chat, with one picture in two conversations."""
    hub = tmp_path / "hub" / "train"
    hub.mkdir(parents=True)
    contents = [jpeg(rng(number)) for number in range(2)]
    rows = []
    for number, picture in enumerate((0, 1, 0, 1)):
        (hub / f"{picture}.jpg").write_bytes(contents[picture])
        turns = [[{"role": "user", "content": f"{number}?"}], [{"role": "user", "content": "no"}]]
        rows.append({"images_file_names": [f"{picture}.jpg"], "conversation": turns})
    (hub / "metadata.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))

    found = vision_arena(tmp_path, 3, str(hub.parent))
    lines = [orjson.loads(line) for line in Path(found.path).read_bytes().splitlines()]
    sent = [b64decode(*(url.partition(",")[2] for url in line["image_files"])) for line in lines]

    assert [line["prompt"] for line in lines] == ["0?", "1?", "2?"]
    assert sent == [contents[0], contents[1], contents[0]]
    assert found.trace[0] == found.trace[2] != found.trace[1]
