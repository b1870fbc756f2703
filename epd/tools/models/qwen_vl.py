"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pictures and videos.

Pictures are sent as metadata only. Half of the layers of Qwen3.5 have linear attention, which vLLM
computes on a CPU only in bfloat16.
"""

from collections.abc import Mapping
from typing import Any

from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from epd.tools.models.model import HIDDEN, TinyModel, text_config
from epd.tools.models.qwen import ROPE, VOCABULARY
from epd.tools.models.weights import GAINS

VISION = {"depth": 2, "num_heads": 4}
SIZED = {**VISION, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": HIDDEN}
WINDOWED = {**SIZED, "window_size": 112, "fullatt_block_indexes": [1]}
TEXT = {"rope_parameters": ROPE}
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 640 * 28 * 28}
INTERLEAVED = {**ROPE, "mrope_interleaved": True}
TEXT_3 = {"head_dim": 64, "rope_parameters": INTERLEAVED}
DEEPSTACK = {**SIZED, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
PATCH = 16
"""Side of a patch since Qwen3-VL, in pixels."""


def _tokens() -> dict[str, Any]:
    return {
        "image_token_id": VOCABULARY.id("<|image_pad|>"),
        "video_token_id": VOCABULARY.id("<|video_pad|>"),
        "vision_start_token_id": VOCABULARY.id("<|vision_start|>"),
        "vision_end_token_id": VOCABULARY.id("<|vision_end|>"),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def qwen2_vl() -> TinyModel:
    """Return a tiny Qwen2-VL."""
    config = Qwen2VLConfig(
        architectures=["Qwen2VLForConditionalGeneration"],
        text_config=text_config(VOCABULARY, rope_parameters=ROPE),
        vision_config={**VISION, "embed_dim": 64, "hidden_size": HIDDEN},
        **_tokens(),
    )
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=PIXELS),
        video_processor=Qwen2VLVideoProcessor(size=PIXELS),
        tokenizer=VOCABULARY.tokenizer(),
    )
    return TinyModel(Qwen2VLForConditionalGeneration(config), processor)


def qwen2_5_vl(
    text: Mapping[str, Any] = TEXT,
    vision: Mapping[str, Any] = WINDOWED,
    pixels: Mapping[str, int] = PIXELS,
    gains: Mapping[str, float] = GAINS,
) -> TinyModel:
    """Return a tiny Qwen2.5-VL, or one of other dimensions."""
    config = Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config=text_config(VOCABULARY, **text),
        vision_config=dict(vision),
        **_tokens(),
    )
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(pixels)),
        video_processor=Qwen2VLVideoProcessor(size=dict(pixels)),
        tokenizer=VOCABULARY.tokenizer(),
    )
    return TinyModel(Qwen2_5_VLForConditionalGeneration(config), processor, gains=gains)


def qwen3_vl(
    text: Mapping[str, Any] = TEXT_3,
    vision: Mapping[str, Any] = DEEPSTACK,
    pixels: Mapping[str, int] = PIXELS,
    gains: Mapping[str, float] = GAINS,
) -> TinyModel:
    """Return a tiny Qwen3-VL, or one of other dimensions."""
    config = Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config=text_config(VOCABULARY, **text),
        vision_config=dict(vision),
        **_tokens(),
    )
    model = Qwen3VLForConditionalGeneration(config)
    return TinyModel(model, qwen3_processor(pixels), gains=gains)


def qwen3_5() -> TinyModel:
    """Return a tiny Qwen3.5, dense."""
    config = Qwen3_5Config(
        architectures=["Qwen3_5ForConditionalGeneration"],
        text_config=text_config(
            VOCABULARY,
            head_dim=64,
            rope_parameters={**INTERLEAVED, "partial_rotary_factor": 1.0},
            layer_types=["linear_attention", "full_attention"],
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        ),
        vision_config={**SIZED, "num_position_embeddings": 256},
        **_tokens(),
    )
    return TinyModel(Qwen3_5ForConditionalGeneration(config), qwen3_processor())


def qwen3_processor(pixels: Mapping[str, int] = PIXELS) -> Qwen3VLProcessor:
    """Return the processor of Qwen3-VL, which Qwen3.5 shares."""
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(pixels), patch_size=PATCH),
        video_processor=Qwen3VLVideoProcessor(size=dict(pixels), patch_size=PATCH),
        tokenizer=VOCABULARY.tokenizer(),
    )
