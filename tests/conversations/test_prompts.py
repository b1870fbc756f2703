"""Prompt of a turn: its name, and the request for its tokens."""

from typing import Any

import pytest

from epd.conversations.prompts import ALIKE, NEUTRAL, prompt_of

CHAT = ("messages", "tools")


def test_a_prompt_is_requested_with_the_fields_that_render_it() -> None:
    body = {"model": "m", "messages": [1], "tools": [2], "temperature": 1, "stream": True}
    prompt = prompt_of(body, CHAT)

    assert prompt is not None
    assert prompt.question == {"model": "m", "messages": [1], "tools": [2]}
    assert prompt.tokens is None


def test_the_form_of_a_prompt_has_every_field_it_depends_on() -> None:
    plain = prompt_of({"messages": []}, CHAT)
    assert plain is not None
    for field in ALIKE:
        other = prompt_of({"messages": [], field: {"a": 1}}, CHAT)
        assert other is not None
        assert other.form != plain.form
    for field in NEUTRAL:
        other = prompt_of({"messages": [], field: 1}, CHAT)
        assert other is not None
        assert other.form == plain.form


@pytest.mark.parametrize("field", ["documents", "reasoning_effort", "truncate_prompt_tokens", "x"])
def test_a_request_with_an_unknown_field_has_no_known_prompt(field: str) -> None:
    assert prompt_of({"messages": [], field: 1}, CHAT) is None


@pytest.mark.parametrize("prompt", ["x", ["x"], [1], [[1]]])
def test_a_chat_with_a_prompt_field_has_no_known_prompt(prompt: Any) -> None:
    assert prompt_of({"messages": [], "prompt": prompt}, CHAT) is None


@pytest.mark.parametrize("field", ["documents", "reasoning_effort", "functions", "x", "echo"])
def test_null_fields_of_an_answer_are_ignored(field: str) -> None:
    assert prompt_of({"messages": [], field: None}, CHAT) == prompt_of({"messages": []}, CHAT)


def chat_of(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "user"}]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "prompt_embeds", "data": "AAAA"},
        {"type": "point_cloud", "point_cloud": "AAAA"},
        {"type": None, "image_url": "http://a/b"},
        {"image_url": "http://a/b"},
        {},
        1,
        None,
    ],
)
def test_a_chat_with_an_uncompared_part_has_no_known_prompt(part: Any) -> None:
    """Two turns may have the same tokens with different embeddings."""
    assert prompt_of(chat_of("a", part), CHAT) is None
    assert prompt_of(chat_of(part, {"type": "text", "text": "a"}), CHAT) is None


@pytest.mark.parametrize(
    "kind", ["text", "thinking", "refusal", "image_url", "input_audio", "image_embeds"]
)
def test_parts_that_are_compared_make_a_prompt(kind: str) -> None:
    assert prompt_of(chat_of("a", {"type": kind}), CHAT) is not None


@pytest.mark.parametrize("prompt", ["x", [1, 2]])
def test_a_batch_of_one_prompt_is_that_prompt(prompt: Any) -> None:
    alone, batch = (prompt_of({"prompt": one}, ("prompt",)) for one in (prompt, [prompt]))

    assert alone is not None
    assert batch == alone
    assert (alone.question["prompt"], alone.tokens) == (prompt, prompt if prompt != "x" else None)
