"""Pictures and conversations such as VisionArena-Chat has, out of a seed."""

import math
import random
from io import BytesIO

from PIL import Image

MEDIAN_PIXELS, SPREAD = 1_000_000, 0.4
MIN_PIXELS, MAX_PIXELS = 250_000, 2_000_000
SHAPES = ((4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16), (1, 1))
"""Of phones, cameras, screens and what is cut for the web."""

GROUND = (8, 8)
"""Of how many patches of colour a picture is."""
GRAIN = 0.65
"""How much of it is noise: at JPEG's quality of 75 this makes half a byte of a pixel."""
QUALITY = 75
"""PIL's own, with which `vllm bench serve` writes each picture anew before it sends it."""

ANOTHER_TURN = 0.5
MAX_TURNS = 6

_ASKS = (
    *("Please describe", "What can you tell me about", "Explain to me", "Write a caption for"),
    *("Translate what is written in", "Find what is wrong with", "Count the things in"),
)
_WHATS = ("this picture", "the screenshot", "the photo", "the diagram", "this page", "the drawing")
_HOWS = (
    *("step by step", "as to a child", "in formal words", "with a joke at the end"),
    *("without any adjectives", "as a list", "and say how sure you are of it"),
)

Turn = list[dict[str, str]]


def size(draw: random.Random) -> tuple[int, int]:
    """Width and height: around a megapixel, of a usual shape."""
    pixels = draw.lognormvariate(math.log(MEDIAN_PIXELS), SPREAD)
    pixels = min(MAX_PIXELS, max(MIN_PIXELS, pixels))
    across, down = draw.choice(SHAPES)
    return int(math.sqrt(pixels * across / down)), int(math.sqrt(pixels * down / across))


def jpeg(draw: random.Random) -> bytes:
    """A picture that is no other's: patches of colour under noise."""
    width, height = size(draw)
    ground = Image.frombytes("RGB", GROUND, draw.randbytes(3 * math.prod(GROUND)))
    grain = Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))
    picture = Image.blend(ground.resize(grain.size, Image.Resampling.BICUBIC), grain, GRAIN)
    buffer = BytesIO()
    picture.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def conversation(draw: random.Random) -> list[Turn]:
    """Turns of a user and a model, one message in each, as VisionArena-Chat has them.

    Questions differ: a prefix cache that knows the picture from another question is of no use.
    """
    turns: list[Turn] = []
    for _ in range(MAX_TURNS):
        ask, what, how = (draw.choice(words) for words in (_ASKS, _WHATS, _HOWS))
        question = f"{ask} {what} in {draw.randrange(20, 2000)} words, {how}."
        turns.append([{"role": "user", "content": question}])
        turns.append([{"role": "assistant", "content": f"You asked about {what}, {how}."}])
        if draw.random() > ANOTHER_TURN:
            break
    return turns
