"""Answers through the stack equal those of an engine that was given the media itself."""

import base64
import mimetypes
import secrets
import wave
from io import BytesIO
from typing import Any
from uuid import uuid4

import openai
import pytest
from PIL import Image

from epd.api.chat import CHAT
from epd.encoder_cache.identity import content_key
from epd.media.parts import Inline, source
from epd.tenants import Scope
from tests.e2e.conftest import MEDIA, Served, metric, stored
from tests.e2e.stacks import AUDIO_STACKS, VISION_STACKS, on
from tests.requests import Part, image, input_audio, text

PREPROCESSED = "vllm:mm_cache_queries_total"
"""Counts the media items an engine was given to preprocess: no item, nothing to encode."""

PICTURES = ("cat.jpg", "coffee.jpg", "astronaut.jpg", "chart.png")
SOUNDS = ("chirp.wav", "chord.wav", "vowels.wav")

on_vision = on(*VISION_STACKS)
on_audio = on(*AUDIO_STACKS)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def picture(name: str, kind: str = "image_url") -> Part:
    data = base64.b64encode((MEDIA / name).read_bytes()).decode()
    media_type = mimetypes.guess_type(name)[0]
    return {"type": kind, kind: {"url": f"data:{media_type};base64,{data}"}}


def file(name: str) -> Part:
    return {"type": "image_url", "image_url": {"url": (MEDIA / name).as_uri()}}


def sound(name: str) -> Part:
    data = base64.b64encode((MEDIA / name).read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def unseen(stack: Served) -> Part:
    """Noise that nobody has sent before, as a picture or a sound."""
    buffer = BytesIO()
    if "vl" in stack.model:
        Image.frombytes("RGB", (224, 224), secrets.token_bytes(224 * 224 * 3)).save(buffer, "PNG")
        return image(buffer.getvalue())
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(secrets.token_bytes(2 * 16000))
    return input_audio(buffer.getvalue())


def ask(
    client: openai.OpenAI, model: str, *parts: Part, stream: bool = False, **more: Any
) -> list[str]:
    """The tokens of an answer at temperature 0."""
    # Under a salt of its own, no request finds another's prompt in a prefix cache.
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
    """The answer through the proxy, once it has been found equal to the engine's alone.

    The engine alone gets the media under keys that nobody has used: it encodes them itself.
    """
    alone = [part if part["type"] == "text" else {**part, "uuid": uuid4().hex} for part in parts]
    expected = ask(stack.baseline, stack.model, *alone, stream=stream, **more)
    answer = ask(stack.client, stack.model, *parts, stream=stream, **more)

    assert len(expected) == 16
    assert expected == answer
    return answer


@both_ways
@on_vision
def test_one_picture(stack: Served, stream: bool) -> None:
    check_equal(stack, picture("cat.jpg"), text(), stream=stream)


@both_ways
@on_vision
def test_four_pictures(stack: Served, stream: bool) -> None:
    check_equal(stack, *map(picture, PICTURES), text(), stream=stream)


@both_ways
@on_vision
def test_a_picture_twice(stack: Served, stream: bool) -> None:
    cat = picture("cat.jpg")
    check_equal(stack, cat, text("and"), picture("coffee.jpg"), cat, stream=stream)


@both_ways
@on_vision
def test_a_picture_from_a_file(stack: Served, stream: bool) -> None:
    check_equal(stack, file("astronaut.jpg"), text(), stream=stream)


@both_ways
@on_vision
def test_a_video(stack: Served, stream: bool) -> None:
    check_equal(stack, picture("ball.gif", "video_url"), text(), stream=stream)


@both_ways
def test_text_only(stack: Served, stream: bool) -> None:
    before = metric(stack.encode, "vllm:request_success_total")
    check_equal(stack, text("say something"), stream=stream)

    assert metric(stack.encode, "vllm:request_success_total") == before


@both_ways
@on_audio
def test_a_sound(stack: Served, stream: bool) -> None:
    check_equal(stack, sound("chirp.wav"), text(), stream=stream)


@both_ways
@on_audio
def test_two_sounds_one_by_url(stack: Served, stream: bool) -> None:
    by_url = picture("vowels.wav", "audio_url")
    check_equal(stack, sound("chord.wav"), by_url, text(), stream=stream)


@on_vision
def test_different_pictures_give_different_answers(stack: Served) -> None:
    """Without this the comparisons above would prove nothing."""
    answers = [ask(stack.client, stack.model, picture(name), text()) for name in PICTURES]
    there = ask(stack.client, stack.model, picture("cat.jpg"), picture("coffee.jpg"), text())
    back = ask(stack.client, stack.model, picture("coffee.jpg"), picture("cat.jpg"), text())

    assert len({tuple(answer) for answer in [*answers, there, back]}) == len(PICTURES) + 2


@on_audio
def test_different_sounds_give_different_answers(stack: Served) -> None:
    answers = {tuple(ask(stack.client, stack.model, sound(name), text())) for name in SOUNDS}

    assert len(answers) == len(SOUNDS)


def test_the_encode_instance_encodes_and_nobody_else(stack: Served) -> None:
    """By the engines' own metrics: all preprocessing was done by the encode engine.

    Prefill and decode were given no media at all, only where to find what the encode engine made.
    """
    engines = [stack.encode, *stack.consumers]
    known = set(stored(stack))
    before = [metric(engine, PREPROCESSED) for engine in engines]
    item = unseen(stack)
    ask(stack.client, stack.model, item, item, text("look!"))
    after = [metric(engine, PREPROCESSED) for engine in engines]

    moved = [new - old for new, old in zip(after, before, strict=True)]
    assert moved == [1] + [0] * len(stack.consumers)
    assert len(set(stored(stack)) - known) == 1


def test_an_engine_that_encodes_itself_would_have_been_seen(stack: Served) -> None:
    """The test above can fail: the same request to the decode engine alone moves its metric."""
    [decode] = [engine for engine in stack.consumers if "decode" in engine.name]
    before = metric(decode, PREPROCESSED)
    ask(stack.baseline, stack.model, unseen(stack), text("look!"))

    assert metric(decode, PREPROCESSED) == before + 1


def test_what_the_encoder_made_is_in_the_store_under_its_content_key(stack: Served) -> None:
    item = picture("shapes.png") if "vl" in stack.model else sound("chord.wav")
    ask(stack.client, stack.model, item, text("first"))
    [found] = CHAT.items({"messages": [{"content": [item]}]})
    media = source(found)
    assert isinstance(media, Inline)

    info = stored(stack)[content_key(Scope(), found.modality, media)]
    dtype = "BF16" if stack.spec.bf16 else "F32"
    assert (info.modality, info.dtype, info.shape[1]) == (found.modality, dtype, 256)
    assert info.metadata


def test_prefill_fetches_from_the_store(stack: Served) -> None:
    consumer = stack.consumers[0]
    before = metric(consumer, "vllm:ec_store_hits_total")
    ask(stack.client, stack.model, unseen(stack), text("fetch it"))

    assert metric(consumer, "vllm:ec_store_hits_total") == before + 1
    assert metric(consumer, "vllm:ec_store_exceptions_total") == 0
