"""Fields of an answer that the proxy takes out of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.conversations.capture import ReplyCapture

PARAMS = {"remote_block_ids": [[1, 2]], "remote_host": "h}", "remote_engine_id": 'a"]}'}
WORDS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            ',"token_ids":[1,2]',
            '","token_ids":[7],"x":"',
            '\\","token_ids":[7]',
            ',"kv_transfer_params":{"a":1}',
            '"kv_transfer_params":{',
            ', "prompt_token_ids": [3]',
        ]
    ),
)


@given(
    st.lists(st.tuples(WORDS, st.lists(st.integers(0, 2**31), max_size=4)), min_size=1, max_size=6),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_a_stream_is_parsed_for_any_model_output(
    pieces: list[tuple[str, list[int]]], prompt: list[int], spaced: bool, wanted: bool
) -> None:
    heard = ReplyCapture(cut_tokens=not wanted)
    for number, (words, tokens) in enumerate(pieces):
        choice: dict[str, Any] = {"index": 0, "delta": {"content": words}}
        event: dict[str, Any] = {"id": words, "choices": [choice]}
        asked: dict[str, Any] = {"choices": [{**choice, "token_ids": tokens}]}
        if not number:
            asked["prompt_token_ids"] = prompt
        nothing = {"choices": [{**choice, "token_ids": None}]} | dict.fromkeys(asked.keys() - event)
        plain = asked if wanted else nothing
        said = {**event, **asked}
        if number == len(pieces) - 1:
            said["kv_transfer_params"] = PARAMS
            plain = {**plain, "kv_transfer_params": None}
        separators = (", ", ": ") if spaced else (",", ":")
        written = json.dumps(said, separators=separators).encode()
        rest = heard.capture_fields(b"data: " + written + b"\n\n")
        assert json.loads(rest.removeprefix(b"data: ")) == {**event, **plain}
    assert heard.prompt == prompt
    assert heard.answer == [token for _, tokens in pieces for token in tokens]
    assert heard.params == PARAMS


@pytest.mark.parametrize(
    "said",
    [
        b'{"a":1,"kv_transfer_params":{"a":',
        b'{"a":1,"kv_transfer_params":null}',
        b'{"a":1,"token_ids":null}',
        b'{"a":1,"token_ids":[[1]]}',
        b'{"a":1,"token_ids":[1,,2]}',
        b'{"a":1,"kv_transfer_params":{"a":' + b"[" * 100_000,
        b'{"a":1,"kv_transfer_params":{"a":' + b"[" * 600 + b"]" * 600 + b"}}",
        b'{"a":1,"kv_transfer_params":{"remote_request_id":"\\ud800"}}',
        b"",
    ],
)
def test_a_stream_without_own_fields_is_relayed_unchanged(said: bytes) -> None:
    heard = ReplyCapture(cut_tokens=True)

    assert heard.capture_fields(said) == said
    assert heard.params is None
    assert not heard.answer
