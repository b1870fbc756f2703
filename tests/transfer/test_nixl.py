"""KV blocks of decode that prefill reads back: parameters, block counts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.transfer.nixl import kept_params, shorten_params

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
