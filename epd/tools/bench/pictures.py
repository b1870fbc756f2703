"""Pictures and questions made from a seed, like those of VisionArena-Chat. No I/O."""

import math
import random
from io import BytesIO

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


def rng(*names: object) -> random.Random:
    """Return a random generator for these names, independent of all other generators."""
    return random.Random("/".join(map(str, names)))  # noqa: S311 - it must be repeatable


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
