import math

import pytest

from epd.tools.observe.entry_sizes import entry_sizes, reported_tokens

QWEN25 = {
    "hidden_size": 3584,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "out_hidden_size": 3584},
}
QWEN3 = {
    "text_config": {"hidden_size": 4096},
    "vision_config": {
        "patch_size": 16,
        "spatial_merge_size": 2,
        "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
GEMMA3 = {
    "mm_tokens_per_image": 256,
    "text_config": {"hidden_size": 2560},
    "vision_config": {"patch_size": 14},
}


@pytest.mark.parametrize(
    ("config", "pixels", "tokens", "token_bytes"),
    [
        (QWEN25, 2560 * 1440, 2560 * 1440 / 784, 2 * 3584),
        (QWEN3, 1280 * 736, 1280 * 736 / 1024, 2 * 4 * 4096),
        (GEMMA3, 1, 256, 2 * 2560),
        ({"thinker_config": QWEN25}, 784, 1, 2 * 3584),
    ],
)
def test_a_picture_has_its_tokens_of_the_language_models_width(
    config: dict[str, object], pixels: int, tokens: float, token_bytes: float
) -> None:
    sizes = entry_sizes(config, {})

    assert sizes is not None
    assert sizes.image_bytes(pixels) == pytest.approx(tokens * token_bytes)


def test_a_picture_is_scaled_into_the_limits_of_the_processor() -> None:
    limits = {"min_pixels": 3136, "max_pixels": 1_003_520}
    sizes = entry_sizes(QWEN25, limits)

    assert sizes is not None
    assert sizes.image_bytes(10**8) == 1_003_520 / 784 * 2 * 3584
    assert sizes.image_bytes(1) == 3136 / 784 * 2 * 3584


def test_a_limit_of_the_edge_is_not_one_of_pixels() -> None:
    sizes = entry_sizes(QWEN25, {"size": {"longest_edge": 1540}})

    assert sizes is not None
    assert (sizes.least_pixels, sizes.most_pixels) == (0.0, 1540**2)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"hidden_size": 1},
        {"vision_config": {"patch_size": 14}},
    ],
)
def test_a_configuration_without_a_width_has_no_rule(config: dict[str, object]) -> None:
    assert entry_sizes(config, {}) is None


@pytest.mark.parametrize(
    "config",
    [
        {**QWEN25, "downsample_ratio": 0.5, "image_seq_length": 256},
        {**QWEN25, "image_grid_pinpoints": [[336, 672]], "image_seq_length": 576},
        {**QWEN25, "scale_factor": 3},
        {"hidden_size": 3584, "audio_config": {"d_model": 1280}},
    ],
)
def test_tokens_that_do_not_follow_from_pixels_are_not_known(config: dict[str, object]) -> None:
    sizes = entry_sizes(config, {})

    assert sizes is not None
    assert sizes.token_bytes == 2 * 3584
    assert sizes.image_bytes(10**6) == 0


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'"prompt_tokens_details":{"multimodal_tokens":{"image":4,"audio":9}}}}', [4, 9]),
        (b'data: {"multimodal_tokens": {"image":4}}\n\ndata: [DONE]\n\n', [4]),
        (b'{"multimodal_tokens":null}', []),
        (b'{"multimodal_tokens":{"image":"4"}}{"multimodal_tokens":{"image":-4}}', []),
        (b'{"multimodal_tokens":{image}}', []),
        (rb'{"content":"{\"multimodal_tokens\":{\"image\":4}}"}', []),
    ],
)
def test_tokens_are_those_of_the_usage(answer: bytes, tokens: list[int]) -> None:
    assert [*reported_tokens(answer).values()] == tokens


def test_a_picture_without_limits_has_any_size() -> None:
    sizes = entry_sizes(QWEN25, {})

    assert sizes is not None
    assert sizes.most_pixels == math.inf


@pytest.mark.parametrize("tokens", [b"9223372036854775807", b"true", b"-1", b"1.5"])
def test_numbers_of_tokens_that_cannot_be_are_ignored(tokens: bytes) -> None:
    assert not reported_tokens(b'{"multimodal_tokens": {"image": %b}}' % tokens)
