"""Estimate of the length of a prompt."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.prompts import prompt_tokens


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, 0),
        ({"prompt": [1] * 77}, 77),
        ({"prompt": "a" * 400}, 100),
        ({"prompt": "字" * 4}, 3),
        ({"prompt": "a" * 5}, 2),
        ({"input": "a" * 40, "instructions": "a" * 4, "user": "a" * 99}, 11),
        ({"messages": [{"role": "user", "content": "a" * 36}]}, 10),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "a" * 32},
                            {"type": "image_url", "image_url": {"url": "a" * 9999}},
                        ],
                    }
                ]
            },
            9,
        ),
        ({"messages": [None, [["aaaa"]]], "tools": [{"x": {"y": ["aaaa"]}}]}, 2),
    ],
)
def test_prompts_are_measured_without_a_tokenizer(body: dict[str, Any], tokens: int) -> None:
    assert prompt_tokens(body) == tokens


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "input", "system"]), JSON))
def test_any_body_can_be_measured(body: dict[str, Any]) -> None:
    assert 0 <= prompt_tokens(body) <= len(json.dumps(body))
