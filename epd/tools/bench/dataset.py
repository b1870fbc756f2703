"""Data sets for `vllm bench serve`: VisionArena-Chat, and generated pictures and questions.

Pictures and questions are generated from a seed and resemble those of VisionArena-Chat. A trace is
the order in which requests repeat pictures; it determines the hit rate of an ideal cache.
"""

import base64
import hashlib
import math
import os
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import orjson
from PIL import Image

MEDIAN_PIXELS, SPREAD = 1_000_000, 0.4
MIN_PIXELS, MAX_PIXELS = 250_000, 2_000_000
SHAPES = ((4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16), (1, 1))
"""Aspect ratios of phones, cameras, screens and web images."""

GROUND = (8, 8)
"""Columns and rows of colour patches in a picture."""
GRAIN = 0.65
"""Share of noise in a picture: with JPEG quality 75, a pixel then takes half a byte."""
QUALITY = 75
"""JPEG quality: PIL's default."""

_ASKS = (
    *("Please describe", "What can you tell me about", "Explain to me", "Write a caption for"),
    *("Translate what is written in", "Find what is wrong with", "Count the things in"),
)
_WHATS = ("this picture", "the screenshot", "the photo", "the diagram", "this page", "the drawing")
_HOWS = (
    *("step by step", "as to a child", "in formal words", "with a joke at the end"),
    *("without any adjectives", "as a list", "and say how sure you are of it"),
)


def size(draw: random.Random) -> tuple[int, int]:
    """Return width and height of a picture, in pixels: about a megapixel, of a usual shape."""
    pixels = draw.lognormvariate(math.log(MEDIAN_PIXELS), SPREAD)
    pixels = min(MAX_PIXELS, max(MIN_PIXELS, pixels))
    across, down = draw.choice(SHAPES)
    return int(math.sqrt(pixels * across / down)), int(math.sqrt(pixels * down / across))


def jpeg(draw: random.Random) -> bytes:
    """Return a unique picture as JPEG: patches of colour under noise."""
    width, height = size(draw)
    ground = Image.frombytes("RGB", GROUND, draw.randbytes(3 * math.prod(GROUND)))
    grain = Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))
    picture = Image.blend(ground.resize(grain.size, Image.Resampling.BICUBIC), grain, GRAIN)
    buffer = BytesIO()
    picture.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def question(draw: random.Random) -> str:
    """Return a question about a picture.

    All questions differ, so a prefix cache cannot reuse a picture from another question.
    """
    ask, what, how = (draw.choice(words) for words in (_ASKS, _WHATS, _HOWS))
    return f"{ask} {what} in {draw.randrange(20, 2000)} words, {how}."


NEW_IN_ARENA = 43 / 200
"""Share of new pictures: VisionArena-Chat has some 43,000 in 200,000 conversations."""
LOCAL = "local"
POOL, POOL_REUSE = 200, 0.8
WINDOW, WINDOW_ROUND = 50, 5

Trace = list[int]
"""Number of the picture of each conversation; equal numbers mean equal pictures. A longer trace of
a replay begins with the shorter one."""


def rng(*names: object) -> random.Random:
    """Return a random generator for these names, independent of all other generators."""
    return random.Random("/".join(map(str, names)))  # noqa: S311 - it must be repeatable


def arena_trace(draw: random.Random, length: int) -> Trace:
    """Return a trace with as many new pictures as VisionArena-Chat; the others are repeated ones.

    A frequent picture is repeated more often (Simon's model): the picture of rank n has a share of
    about n ** -(1 - NEW_IN_ARENA), near Zipf's law. A short trace has the same rate as the whole
    data set. A small sample of the 200,000 conversations would repeat hardly any picture.
    """
    trace: Trace = []
    for number in range(length):
        new = not trace or draw.random() < NEW_IN_ARENA
        trace.append(number if new else draw.choice(trace))
    return trace


def pool(draw: random.Random, length: int) -> Trace:
    """Return a trace of 200 pictures at 80% reuse: 1 of 5 conversations has a unique picture."""
    return [
        draw.randrange(POOL) if draw.random() < POOL_REUSE else POOL + number
        for number in range(length)
    ]


def window_trace(draw: random.Random, length: int) -> Trace:
    """Return a trace with a sliding window: 4 of 5 pictures were among the last 50."""
    trace: Trace = []
    for number in range(length):
        trace.append(draw.choice(trace[-WINDOW:]) if number % WINDOW_ROUND else number)
    return trace


REPLAYS: Mapping[str, Callable[[random.Random, int], Trace]] = MappingProxyType(
    {LOCAL: arena_trace, "pool": pool, "window": window_trace}
)
"""Function that makes the trace, by the name of the data set."""


def ideal_hit_rate(trace: Sequence[Hashable]) -> float:
    """Return the hit rate of a cache of all pictures, which is empty at first."""
    return (len(trace) - len(set(trace))) / len(trace)


def seen_before(trace: Iterable[Hashable]) -> list[bool]:
    """Return for each picture of the trace whether it occurred before."""
    seen: set[Hashable] = set()
    before = []
    for picture in trace:
        before.append(picture in seen)
        seen.add(picture)
    return before


HUB_NAME = "lmarena-ai/VisionArena-Chat"
VISION_ARENA = "visionarena"


class BenchFailed(Exception):
    """Error of a benchmark without a result. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Data set of one run: a file for vLLM, and the picture of each request in turn."""

    name: str
    path: str
    trace: tuple[str, ...]


def local(data_dir: Path, name: str, prompts: int, seed: int) -> Dataset:
    """Write the conversations of a replay, as vLLM's `custom_image`; present pictures are kept."""
    trace = REPLAYS[name](rng(seed, name), prompts)
    folder = data_dir / f"{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {number: folder / f"{number:06}.jpg" for number in sorted(set(trace))}
    for number, path in pictures.items():
        if not path.exists():
            _publish(path, [jpeg(rng(seed, name, "picture", number))])
    prompts_of = (question(rng(f"{seed}/{name}/{at}")) for at in range(len(trace)))
    return _written(name, folder, zip(prompts_of, map(pictures.__getitem__, trace), strict=True))


def vision_arena(data_dir: Path, prompts: int, source: str = HUB_NAME) -> Dataset:
    """Write the first conversations of VisionArena-Chat; `source` is its name on the hub.

    Only the first message of a conversation and its first picture are used, as by vLLM
    (`vllm/benchmarks/datasets.py`, `VisionArenaDataset`).

    Raises:
        BenchFailed: the hub cannot be reached, or denies access.
    """
    # Installed only in environments that run this benchmark.
    from datasets import load_dataset  # noqa: PLC0415
    from huggingface_hub import HfApi  # noqa: PLC0415

    folder = data_dir / VISION_ARENA
    folder.mkdir(parents=True, exist_ok=True)
    requests = []
    try:
        if source == HUB_NAME:  # one request: `load_dataset` would retry for half a minute
            HfApi().auth_check(HUB_NAME, repo_type="dataset")
        rows = load_dataset(source, split="train", streaming=True)
        for row in islice(rows.decode(enable=False), prompts):
            image = row["images"][0]
            content = image["bytes"] or Path(image["path"]).read_bytes()
            path = folder / hashlib.sha256(content).hexdigest()
            if not path.exists():
                _publish(path, [content])
            requests.append((row["conversation"][0][0]["content"], path))
    except Exception as error:  # the type depends on the version of the HTTP library
        lines = str(error).strip().splitlines()
        reason = lines[-1] if lines else type(error).__name__
        raise BenchFailed(f"VisionArena-Chat cannot be read: {reason}") from error
    return _written(VISION_ARENA, folder, requests)


def _written(name: str, folder: Path, requests: Iterable[tuple[str, Path]]) -> Dataset:
    """Write the file that vLLM reads as `custom_image`: a prompt and a picture in each line.

    Pictures are data URLs, which vLLM sends unchanged; it would convert a picture of a file to PNG.
    """
    asked = list(requests)
    rows = ({"prompt": prompt, "image_files": [_data_url(path)]} for prompt, path in asked)
    file = folder / "requests.jsonl"
    _publish(file, (orjson.dumps(row) + b"\n" for row in rows))
    return Dataset(name, str(file), tuple(path.name for _, path in asked))


def _data_url(path: Path) -> str:
    with Image.open(path) as picture:
        media_type = picture.get_format_mimetype()
    return f"data:{media_type};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _publish(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file atomically: another run may read or write it at the same time."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    with staging.open("wb") as file:
        file.writelines(chunks)
    staging.replace(path)
