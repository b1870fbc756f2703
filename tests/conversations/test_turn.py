"""State between the turns of a conversation: token comparison, answers, block counts. Pure."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.conversations.capture import ReplyCapture
from epd.conversations.entry import CHUNK, Fingerprint
from epd.conversations.prompts import ALIKE, NEUTRAL, prompt_of
from epd.encoder_cache.identity import conversation_key
from epd.tenants import ANONYMOUS, Scope, Tenant
from epd.transfer.nixl import kept_params, shorten_params

TOKENS = st.lists(st.integers(0, 3), max_size=5 * CHUNK)


@given(TOKENS, TOKENS, st.integers(0, 5 * CHUNK))
def test_the_shared_prefix_ends_at_the_first_different_token(
    held: list[int], other: list[int], cut: int
) -> None:
    prompt = held[:cut] + other
    same = next(
        (at for at, pair in enumerate(zip(held, prompt, strict=False)) if pair[0] != pair[1]),
        min(len(held), len(prompt)),
    )
    whole = same == len(held)

    assert Fingerprint.of_tokens(held).shared_prefix_len(prompt) == (
        same if whole else same // CHUNK * CHUNK
    )


def test_a_fingerprint_matches_only_with_its_key() -> None:
    tokens = list(range(3 * CHUNK))
    kept = Fingerprint.of_tokens(tokens, b"key")

    assert kept.shared_prefix_len(tokens, b"key") == len(tokens)
    assert kept.shared_prefix_len(tokens, b"another") == kept.shared_prefix_len(tokens) == 0


@pytest.mark.parametrize("wrong", [[-1], [2**32], ["a"], [1.5], [None], [[1]]])
def test_invalid_tokens_are_rejected(wrong: list[Any]) -> None:
    with pytest.raises(ValueError, match="tokens"):
        Fingerprint.of_tokens(wrong)
    with pytest.raises(ValueError, match="tokens"):
        Fingerprint.of_tokens([1]).shared_prefix_len(wrong)


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


SAID = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[29, 30, 31]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "localhost",
    "remote_port": 15610,
    "tp_size": 1,
    "remote_num_tokens": 264,
    "remote_blocks_expiry_time": 49071.94,
    "transfer_mode": "pull",
}


def test_fields_of_decode_are_stored_unchanged() -> None:
    assert kept_params(SAID, "http://10.0.0.1:8000") == SAID


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])  # noqa: S104 - a server may report it
def test_a_wildcard_host_is_replaced_by_the_host_of_the_url(host: str) -> None:
    kept = kept_params({**SAID, "remote_host": host}, "http://10.0.0.1:8000")

    assert kept == {**SAID, "remote_host": "10.0.0.1"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"do_remote_decode": False},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": None},
        {"remote_num_tokens": 0},
        {"remote_engine_id": None},
        {"remote_host": "h" * 254},
        {"remote_port": "1"},
        {"transfer_mode": "push"},
    ],
)
def test_invalid_fields_of_decode_are_not_stored(wrong: dict[str, Any]) -> None:
    assert kept_params({**SAID, **wrong}, "http://d:1") is None


@given(st.integers(1, 264))
def test_the_first_tokens_are_in_the_first_blocks(tokens: int) -> None:
    short = shorten_params(SAID, tokens, 128)

    assert short is not None
    assert short["remote_num_tokens"] == tokens
    assert short["remote_block_ids"] == [[29, 30, 31][: -(-tokens // 128)]]


def test_blocks_of_other_sizes_or_kinds_have_no_digests() -> None:
    assert shorten_params(SAID, 100, 16) is None
    assert shorten_params({**SAID, "remote_block_ids": [[1, 2, 3], [4, 5, 6]]}, 100, 128) is None
    assert shorten_params({**SAID, "remote_block_ids": [1, 2, 3]}, 100, 128) is None


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


def test_the_key_of_a_conversation_is_a_tenants_own_of_a_model_and_a_salt() -> None:
    alice, bob = Scope(Tenant("alice")), Scope(Tenant("bob"))
    keys = {
        conversation_key(scope, body, name)
        for scope in (alice, bob, Scope(ANONYMOUS))
        for body in ({"model": "m"}, {"model": "n"}, {}, {"model": "m", "cache_salt": "s"})
        for name in ("a", "b")
    }

    assert len(keys) == 24
    assert all(len(key) == 64 for key in keys)
