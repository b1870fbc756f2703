"""Fingerprints of the tokens of a turn."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.conversations.entry import CHUNK, Fingerprint

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
