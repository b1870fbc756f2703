"""Requests, and comparison of their answers."""

import base64
import math
import mimetypes
import secrets
import struct
import wave
from io import BytesIO
from typing import Any
from uuid import uuid4

import openai
import pytest
from PIL import Image

from tests.e2e.served import Served
from tests.paths import MEDIA
from tests.requests import Part, image, input_audio

PREPROCESSED = "vllm:mm_cache_queries_total"
"""Counter of the media items that an engine had to preprocess; zero means nothing was encoded."""

PICTURES = ("cat.jpg", "coffee.jpg", "astronaut.jpg", "chart.png")

SOUNDS = ("chirp.wav", "chord.wav", "vowels.wav")

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["not-streamed", "streamed"])


def picture(name: str, kind: str = "image_url") -> Part:
    data = base64.b64encode((MEDIA / name).read_bytes()).decode()
    media_type = mimetypes.guess_type(name)[0]
    return {"type": kind, kind: {"url": f"data:{media_type};base64,{data}"}}


def file(name: str) -> Part:
    return {"type": "image_url", "image_url": {"url": (MEDIA / name).as_uri()}}


def sound(name: str) -> Part:
    data = base64.b64encode((MEDIA / name).read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def unseen(stack: Served, side: int = 224) -> Part:
    """Return a new picture, with sides of this length, or a new sound, made of random noise."""
    buffer = BytesIO()
    if "vl" in stack.model:
        noise = secrets.token_bytes(side * side * 3)
        Image.frombytes("RGB", (side, side), noise).save(buffer, "PNG")
        return image(buffer.getvalue())
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(secrets.token_bytes(2 * 16000))
    return input_audio(buffer.getvalue())


def tone(hertz: int) -> Part:
    """Return a tone of one second."""
    buffer, samples = BytesIO(), range(16000)
    waves = [round(20000 * math.sin(2 * math.pi * hertz * at / 16000)) for at in samples]
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(struct.pack("<16000h", *waves))
    return input_audio(buffer.getvalue())


def ask(
    client: openai.OpenAI, model: str, *parts: Part, stream: bool = False, **more: Any
) -> list[str]:
    """Return the tokens of the answer at temperature 0."""
    # With a salt of its own, no request reuses another's prompt from a prefix cache.
    salt = {"cache_salt": secrets.token_hex(8), **more}
    fixed: dict[str, Any] = {
        "max_tokens": 16,
        "temperature": 0,
        "logprobs": True,
        "extra_body": salt,
    }
    messages: Any = [{"role": "user", "content": list(parts)}]
    if not stream:
        reply = client.chat.completions.create(model=model, messages=messages, **fixed)
        logprobs = [reply.choices[0].logprobs]
    else:
        events = client.chat.completions.create(
            model=model, messages=messages, stream=True, **fixed
        )
        logprobs = [choice.logprobs for event in events for choice in event.choices]
    return [token.token for entry in logprobs if entry for token in entry.content or []]


def check_equal(stack: Served, *parts: Part, stream: bool, **more: Any) -> list[str]:
    """Check that the answer through the proxy equals the engine's own; return it.

    The engine alone gets the media under unused keys, so that it encodes them itself.
    """
    alone = [part if part["type"] == "text" else {**part, "uuid": uuid4().hex} for part in parts]
    expected = ask(stack.baseline, stack.model, *alone, stream=stream, **more)
    answer = ask(stack.client, stack.model, *parts, stream=stream, **more)

    assert len(expected) == 16
    assert expected == answer
    return answer
