"""Predicted tokens of media items."""

from hypothesis import given
from hypothesis import strategies as st

from epd.request.item_tokens import PIXELS_PER_TOKEN, TYPICAL_TOKENS, TokenCounts

PIXELS = st.integers(1, 100_000_000)
TOKENS = st.integers(1, 100_000)


def test_picture_without_learned_counts_has_the_tokens_of_qwen() -> None:
    assert TokenCounts().predict_tokens("m", "image", 100 * PIXELS_PER_TOKEN) == 100


def test_item_of_unknown_size_has_the_typical_tokens_of_its_modality() -> None:
    counts = TokenCounts()

    assert [counts.predict_tokens("m", one) for one in TYPICAL_TOKENS] == [1024, 512, 4096]


def test_item_of_unknown_size_has_the_mean_of_reported_counts() -> None:
    counts = TokenCounts()
    counts.learn_tokens("m", "audio", 0, 50)

    assert counts.predict_tokens("m", "audio") == 50


def test_factor_is_learned_for_each_model_and_modality() -> None:
    counts = TokenCounts()
    counts.learn_tokens("m", "image", 1_000_000, 100)

    assert counts.predict_tokens("m", "image", 1_000_000) == 100
    assert counts.predict_tokens("other", "image", 1_000_000) == round(1_000_000 / PIXELS_PER_TOKEN)
    assert counts.predict_tokens("m", "video") == TYPICAL_TOKENS["video"]


def test_model_with_the_same_tokens_for_all_sizes_is_learned_by_size() -> None:
    counts = TokenCounts()
    sizes = [10_000, 100_000, 1_000_000]
    for pixels in sizes * 50:
        counts.learn_tokens("llava", "image", pixels, 576)

    assert [counts.predict_tokens("llava", "image", one) for one in sizes] == [576, 576, 576]


def test_size_between_learned_ones_has_the_factor_of_the_nearest() -> None:
    counts = TokenCounts()
    counts.learn_tokens("m", "image", 1 << 10, 1 << 10)
    counts.learn_tokens("m", "image", 1 << 20, 1 << 10)

    assert counts.predict_tokens("m", "image", 1 << 12) == 1 << 12
    assert counts.predict_tokens("m", "image", 1 << 19) == 1 << 9


@given(st.lists(st.tuples(PIXELS, TOKENS)), PIXELS)
def test_prediction_is_within_the_learned_factors(
    learned: list[tuple[int, int]], pixels: int
) -> None:
    counts = TokenCounts()
    for size, tokens in learned:
        counts.learn_tokens("m", "image", size, tokens)
    factors = [tokens / size for size, tokens in learned] or [1 / PIXELS_PER_TOKEN]

    predicted = counts.predict_tokens("m", "image", pixels)

    low, high = (pixels * one(factors) for one in (min, max))
    assert max(1, round(low * (1 - 1e-9))) <= predicted <= max(1, round(high * (1 + 1e-9)))


def test_missing_count_is_not_learned() -> None:
    counts = TokenCounts()
    counts.learn_tokens("m", "image", 1000, 0)

    assert counts.predict_tokens("m", "image") == TYPICAL_TOKENS["image"]
