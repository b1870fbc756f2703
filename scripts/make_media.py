"""Generate the synthetic files of `examples/media`; the photographs there are not generated.

    python scripts/make_media.py [DIR]

It needs pillow. The same version of pillow gives the same bytes.
"""

import argparse
import math
import wave
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

MEDIA = Path(__file__).parents[1] / "examples" / "media"
RATE_HZ = 16_000
VOWELS_HZ = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240))
"""Formants of ah, ee and oo: Peterson and Barney, "Control methods used in a study of the vowels"
(1952), table II, men."""
SENTENCES = (
    "The encoder reads a picture once.",
    "Its output is stored under a key",
    "made from the picture's content.",
    "Whoever sends the same picture",
    "again is served from the store.",
    "Prefill then needs the key alone:",
    "no pixels travel a second time.",
)


def main() -> None:
    """Write all generated files into the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=MEDIA)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in (("chart", chart()), ("shapes", shapes()), ("page", page())):
        picture.save(folder / f"{name}.png", optimize=True)
    first, *rest = frames()
    first.save(folder / "ball.gif", save_all=True, append_images=rest, duration=125, loop=0)
    for name, samples in (("chirp", chirp()), ("chord", chord()), ("vowels", vowels())):
        record(folder / f"{name}.wav", samples)


def chart() -> Image.Image:
    """Return a chart: bars and a line over labelled axes."""
    image = Image.new("RGB", (640, 420), "white")
    draw = ImageDraw.Draw(image)
    heights = (120, 210, 160, 280, 90, 240)
    centres = [110 + 90 * i for i in range(len(heights))]
    for y in range(60, 361, 60):
        draw.line((60, y, 620, y), fill="lightgray")
        draw.text((20, y - 8), str(360 - y), fill="black", font=font(16))
    months = ("Jan", "Feb", "Mar", "Apr", "May", "Jun")
    for x, height, month in zip(centres, heights, months, strict=True):
        draw.rectangle((x - 28, 360 - height, x + 28, 360), fill="steelblue", outline="navy")
        draw.text((x - 14, 370), month, fill="black", font=font(16))
    trend = [(x, 340 - height * 0.7) for x, height in zip(centres, reversed(heights), strict=True)]
    draw.line(trend, fill="crimson", width=4)
    draw.line((60, 40, 60, 360, 620, 360), fill="black", width=2)
    draw.text((200, 12), "Requests per month", fill="black", font=font(22))
    return image


def shapes() -> Image.Image:
    across, down = Image.linear_gradient("L").rotate(90), Image.linear_gradient("L")
    flat = Image.new("L", across.size, 96)
    image = Image.merge("RGB", (across, flat, down)).resize((560, 420))
    draw = ImageDraw.Draw(image)
    draw.ellipse((40, 60, 220, 240), fill="gold", outline="black", width=4)
    draw.rectangle((250, 180, 400, 380), fill="white", outline="black", width=4)
    draw.polygon([(480, 40), (540, 240), (390, 150)], fill="limegreen", outline="black")
    draw.regular_polygon((140, 330, 70), 6, fill="orangered", outline="black")
    return image


def page() -> Image.Image:
    image = Image.new("L", (500, 640), 246)
    draw = ImageDraw.Draw(image)
    draw.text((48, 40), "On encoding once", fill=16, font=font(36))
    for line in range(16):
        draw.text((48, 112 + 31 * line), SENTENCES[line % len(SENTENCES)], fill=40, font=font(22))
    return image


def frames(count: int = 8) -> list[Image.Image]:
    """Return the frames of a ball that flies in an arc."""
    images = []
    for i in range(count):
        image = Image.new("P", (224, 168), 0)
        image.putpalette((235, 240, 255, 200, 40, 40, 60, 120, 60))
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 140, 224, 168), fill=2)
        x, y = 24 + 176 * i / (count - 1), 120 - 96 * math.sin(math.pi * i / (count - 1))
        draw.ellipse((x - 18, y - 18, x + 18, y + 18), fill=1)
        images.append(image)
    return images


def font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def chirp() -> list[float]:
    """Return the samples of a tone that rises from 200 to 4000 Hz."""
    seconds, low, high = 1.5, 200.0, 4000.0
    slope = (high - low) / (2 * seconds)
    return sample(seconds, lambda t: math.sin(2 * math.pi * (low * t + slope * t * t)))


def chord() -> list[float]:
    """Return the samples of a plucked major triad on A."""
    tones = (220.0, 277.18, 329.63)
    return sample(
        1.2, lambda t: math.exp(-2 * t) * sum(math.sin(2 * math.pi * hz * t) for hz in tones)
    )


def vowels() -> list[float]:
    """Return the samples of three vowels of a low voice, with a pause after each."""
    breath = [0.0] * (RATE_HZ // 10)
    return [value for formants in VOWELS_HZ for value in (*vowel(formants), *breath)]


def vowel(formants: Iterable[float], pitch_hz: float = 120, seconds: float = 0.6) -> list[float]:
    """Return the samples of one vowel: harmonics with the loudness that the formants give."""
    harmonics = [n * pitch_hz for n in range(1, 30)]
    loudness = {hz: sum(1 / (1 + ((hz - f) / 80) ** 2) for f in formants) for hz in harmonics}

    def voice(t: float) -> float:
        fade = math.sin(math.pi * t / seconds)
        return fade * sum(a * math.sin(2 * math.pi * hz * t) for hz, a in loudness.items())

    return sample(seconds, voice)


def sample(seconds: float, signal: Callable[[float], float]) -> list[float]:
    """Return the values of a signal at the sampling rate."""
    return [signal(i / RATE_HZ) for i in range(round(seconds * RATE_HZ))]


def record(path: Path, samples: list[float]) -> None:
    """Write samples as 16 bit mono, their peak at 80% of full scale."""
    scale = 0.8 * 32767 / max(map(abs, samples))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes(array("h", (round(scale * value) for value in samples)).tobytes())


if __name__ == "__main__":
    main()
