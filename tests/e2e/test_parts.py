"""Content parts with further fields, on real engines: the prompt is that of one engine."""

import json
import secrets
from io import BytesIO
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from epd.api.items import MODALITY, REFUSED
from tests.e2e.asking import ask, both_ways, check_equal, unseen
from tests.e2e.served import ENCODED, Served, metric
from tests.requests import Part, image, request, text

JSON = {"Content-Type": "application/json"}

NULLS = dict.fromkeys([*MODALITY, *REFUSED, "uuid", "refusal", "file_id"])
"""Fields as a typed client writes them that knows parts of every kind."""


def chat_prompt(client: openai.OpenAI, model: str, *parts: Part) -> Any:
    """Return the tokens of a chat's prompt."""
    messages: Any = [{"role": "user", "content": list(parts)}]
    more = {"return_token_ids": True, "cache_salt": secrets.token_hex(8)}
    reply: Any = client.chat.completions.create(
        model=model, messages=messages, max_tokens=1, extra_body=more
    )
    return reply.prompt_token_ids


def respond(client: openai.OpenAI, model: str, *parts: Part) -> tuple[str, int]:
    """Return the answer of the responses API to pictures, and the number of its prompt's tokens."""
    words = {"type": "input_text", "text": "which?", **NULLS}
    reply: Any = client.responses.create(
        model=model,
        input=[{"role": "user", "content": [*parts, words]}],  # type: ignore[list-item, misc]
        max_output_tokens=16,
        temperature=0,
        extra_body={"cache_salt": secrets.token_hex(8)},
    )
    return reply.output_text, reply.usage.input_tokens


def alone(part: Part) -> Part:
    """Return a part under an unused key, so that an engine encodes it itself."""
    return part if "text" in part else {**part, "uuid": uuid4().hex}


@both_ways
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_chat_template_gets_the_fields_of_pictures(
    stack: Served, count: int, named: bool, stream: bool
) -> None:
    names = [{"uuid": uuid4().hex} if named else {} for _ in range(count)]
    parts = [{**unseen(stack), **name, "language": f"de-{at}"} for at, name in enumerate(names)]
    plain = chat_prompt(stack.baseline, stack.model, *map(alone, parts), text())
    for _ in ("new", "hit"):
        check_equal(stack, *parts, text(), stream=stream)
        assert chat_prompt(stack.client, stack.model, *parts, text()) == plain
    others = [{**part, "language": "fr"} for part in parts]
    check_equal(stack, *others, text(), stream=stream)

    assert chat_prompt(stack.client, stack.model, *others, text()) != plain


def test_a_chat_template_gets_the_fields_of_pictures_in_a_response(stack: Served) -> None:
    urls = [unseen(stack)["image_url"]["url"] for _ in range(2)]
    pictures = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    parts = [{**part, "language": f"de-{at}"} for at, part in enumerate(pictures)]
    expected = respond(stack.baseline, stack.model, *map(alone, parts))
    for _ in ("new", "hit"):
        assert respond(stack.client, stack.model, *parts) == expected
    _, fewer = respond(stack.client, stack.model, *pictures)

    assert expected[1] - fewer == len("de-0" + "de-1")


def test_a_picture_is_encoded_once_for_all_media_types_that_clients_guess(stack: Served) -> None:
    item = unseen(stack)
    data = item["image_url"]["url"].partition(",")[2]
    first = check_equal(stack, item, text(), stream=False)
    encoded = metric(stack.encode, ENCODED)
    for kind in ("image/jpg", "image/png", "", "text/plain", "video/jpeg", "image/png;a=b"):
        guessed = image(f"data:{kind};base64,{data}")
        assert check_equal(stack, guessed, text(), stream=False) == first

    assert metric(stack.encode, ENCODED) == encoded


def test_a_sound_is_encoded_once_for_all_formats_that_clients_guess(stack: Served) -> None:
    item = unseen(stack)
    data = {"data": item["input_audio"]["data"]}
    first = check_equal(stack, item, text(), stream=False)
    encoded = metric(stack.encode, ENCODED)
    for named in ({}, {"format": None}, {"format": ""}, {"format": "flac"}):
        guessed = {**NULLS, "type": "input_audio", "input_audio": {**data, **named}}
        answer = ask(stack.client, stack.model, guessed, text())
        assert answer == first
    spoken = {**item, "language": "de"}
    assert check_equal(stack, spoken, text(), stream=False) != first

    assert metric(stack.encode, ENCODED) == encoded


@pytest.mark.parametrize(("character", "escape"), [("/", r"\/"), ("+", r"\u002B")])
def test_a_large_picture_with_escapes_is_the_picture_without(
    stack: Served, character: str, escape: str
) -> None:
    """The body has 17 MB, more than the limit of text."""
    comment, file = PngInfo(), BytesIO()
    comment.add_text(
        "Comment", secrets.token_bytes(12_500_000).replace(b"\0", b" ").decode("latin-1")
    )
    noise = Image.frombytes("RGB", (112, 112), secrets.token_bytes(112 * 112 * 3))
    noise.save(file, "PNG", pnginfo=comment)
    asked = request(image(file.getvalue()), text(), model=stack.model, max_tokens=4, temperature=0)
    plain = json.dumps(asked)
    replies = [
        httpx.post(f"{stack.stack.url}/v1/chat/completions", content=body, headers=JSON, timeout=60)
        for body in (plain, plain.replace(character, escape))
    ]

    assert [reply.status_code for reply in replies] == [200, 200]
    assert ["hit=1" in reply.headers["x-epd-items"] for reply in replies] == [False, True]
    first, again = (reply.json()["choices"] for reply in replies)
    assert first == again


def test_parts_with_every_field_are_what_their_type_says(stack: Served) -> None:
    picture, words = {**NULLS, **unseen(stack)}, {**NULLS, **text()}
    plain = [alone({"type": "image_url", "image_url": picture["image_url"]}), text()]
    expected = chat_prompt(stack.baseline, stack.model, *plain)
    url = picture["image_url"]["url"]
    response = {**NULLS, "type": "input_image", "image_url": url, "detail": "auto"}
    body = {"model": stack.model, "messages": [{"role": "user", "content": [picture, words]}]}
    for parts in ([picture, words], [response, words]):
        assert chat_prompt(stack.client, stack.model, *parts) == expected
    assert len(chat_prompt(stack.client, stack.model, words)) < len(expected)
    plain = [{"type": "input_image", "image_url": url, "detail": "auto"}]
    own = respond(stack.baseline, stack.model, *map(alone, plain))
    assert respond(stack.client, stack.model, response) == own
    engine = stack.consumers[-1]
    counts = [
        httpx.post(f"{server}/tokenize", json=body, timeout=60).json()["count"]
        for server in (stack.stack.url, engine.url)
    ]
    assert counts[0] == counts[1]
