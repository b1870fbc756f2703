"""Generated pictures, videos and sounds; each number gives different ones."""

import base64
import math
import wave
from array import array
from functools import cache
from io import BytesIO
from typing import Any

import av
from PIL import Image, ImageDraw

from scripts.make_media import MEDIA, RATE_HZ

Part = dict[str, Any]

PHOTOGRAPHS = ("cat.jpg", "coffee.jpg", "astronaut.jpg", "chart.png")
SMALL, LARGE = (224, 168), (896, 640)
FRAMES, FRAMES_PER_S = 8, 4


def picture(number: int, size: tuple[int, int] = SMALL) -> Part:
    """Return one of four photographs, with bars at places that depend on the number."""
    return part("image_url", "image/png", encoded(drawn(number, size), "PNG"))


def video(number: int) -> Part:
    """Return two seconds of a moving photograph, as MPEG-4."""
    buffer = BytesIO()
    with av.open(buffer, "w", format="mp4") as film:
        stream = film.add_stream("mpeg4", rate=FRAMES_PER_S)
        stream.width, stream.height = SMALL
        stream.pix_fmt = "yuv420p"
        for image in wandering(number):
            frame = av.VideoFrame.from_image(image)  # type: ignore[no-untyped-call]
            film.mux(stream.encode(frame))
        film.mux(stream.encode())
    return part("video_url", "video/mp4", buffer.getvalue())


def frames(number: int) -> Part:
    """Return the same video as JPEG pictures, which vLLM accepts separated by commas."""
    pictures = [base64.b64encode(encoded(image, "JPEG")).decode() for image in wandering(number)]
    return {
        "type": "video_url",
        "video_url": {"url": f"data:video/jpeg;base64,{','.join(pictures)}"},
    }


def sound(number: int, seconds: float = 1.0) -> Part:
    """Return a tone with some of its harmonics, rising or falling, at 16 kHz."""
    pitch_hz, slope = 90 * 1.45 ** (number % 7), (0.0, 1.5, -0.4)[number % 3]
    harmonics = [1, 2 + number % 4, 5 + number % 11]
    samples = array("h")
    for step in range(round(seconds * RATE_HZ)):
        t = step / RATE_HZ
        phase = math.tau * pitch_hz * t * (1 + slope * t / 2)
        tones = sum(math.sin(phase * harmonic) for harmonic in harmonics)
        samples.append(round(9000 * tones * abs(math.cos(math.tau * (1 + number % 5) * t))))
    buffer = BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def text(words: str = "what?") -> Part:
    return {"type": "text", "text": words}


def part(kind: str, media_type: str, content: bytes) -> Part:
    return {
        "type": kind,
        kind: {"url": f"data:{media_type};base64,{base64.b64encode(content).decode()}"},
    }


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def drawn(number: int, size: tuple[int, int]) -> Image.Image:
    image = photograph(number % len(PHOTOGRAPHS)).resize(size)
    draw = ImageDraw.Draw(image)
    width, height = size
    for bar in range(3):
        left = (number * 37 + bar * 71) % width
        colour = tuple((number * 53 + bar * 97 + channel * 61) % 256 for channel in range(3))
        draw.rectangle((left, height * bar // 4, left + width // 6, height - 1), fill=colour)
    return image


def wandering(number: int) -> list[Image.Image]:
    wide = drawn(number, (2 * SMALL[0], SMALL[1]))
    steps = [SMALL[0] * frame // FRAMES for frame in range(FRAMES)]
    return [wide.crop((step, 0, step + SMALL[0], SMALL[1])) for step in steps]


@cache
def photograph(index: int) -> Image.Image:
    return Image.open(MEDIA / PHOTOGRAPHS[index]).convert("RGB")
