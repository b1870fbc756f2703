"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pictures and videos.

Pictures are sent as metadata only. Half of the layers of Qwen3.5 have linear attention, which vLLM
computes on a CPU only in bfloat16.
"""

from collections.abc import Mapping
from typing import Any

from transformers import (
    PreTrainedModel,
    ProcessorMixin,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from epd.tools.models.model import HIDDEN, TinyModel, model_of, text_config
from epd.tools.models.qwen import ROPE, TOWER, VOCABULARY
from epd.tools.models.weights import GAINS

WINDOWED = {**TOWER, "window_size": 112, "fullatt_block_indexes": [1]}
TEXT = {"rope_parameters": ROPE}
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 640 * 28 * 28}
INTERLEAVED = {**ROPE, "mrope_interleaved": True}
TEXT_3 = {"head_dim": 64, "rope_parameters": INTERLEAVED}
DEEPSTACK = {**TOWER, "num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
PATCH = 16
"""Side of a patch since Qwen3-VL, in pixels."""


def _model(
    kind: type[PreTrainedModel], text: Mapping[str, Any], vision: Mapping[str, Any]
) -> PreTrainedModel:
    return model_of(
        kind,
        text_config=text_config(VOCABULARY, **text),
        vision_config=dict(vision),
        image_token_id=VOCABULARY.id("<|image_pad|>"),
        video_token_id=VOCABULARY.id("<|video_pad|>"),
        vision_start_token_id=VOCABULARY.id("<|vision_start|>"),
        vision_end_token_id=VOCABULARY.id("<|vision_end|>"),
    )


def qwen2_vl() -> TinyModel:
    """Return a tiny Qwen2-VL."""
    vision = {"depth": 2, "num_heads": 4, "embed_dim": 64, "hidden_size": HIDDEN}
    model = _model(Qwen2VLForConditionalGeneration, TEXT, vision)
    return TinyModel(model, _processor(Qwen2VLProcessor, PIXELS))


def qwen2_5_vl(
    text: Mapping[str, Any] = TEXT,
    vision: Mapping[str, Any] = WINDOWED,
    pixels: Mapping[str, int] = PIXELS,
    gains: Mapping[str, float] = GAINS,
) -> TinyModel:
    """Return a tiny Qwen2.5-VL, or one of other dimensions."""
    model = _model(Qwen2_5_VLForConditionalGeneration, text, vision)
    return TinyModel(model, _processor(Qwen2_5_VLProcessor, pixels), gains=gains)


def qwen3_vl(
    text: Mapping[str, Any] = TEXT_3,
    vision: Mapping[str, Any] = DEEPSTACK,
    pixels: Mapping[str, int] = PIXELS,
    gains: Mapping[str, float] = GAINS,
) -> TinyModel:
    """Return a tiny Qwen3-VL, or one of other dimensions."""
    model = _model(Qwen3VLForConditionalGeneration, text, vision)
    return TinyModel(model, qwen3_processor(pixels), gains=gains)


def qwen3_5() -> TinyModel:
    """Return a tiny Qwen3.5, dense."""
    text = {
        "head_dim": 64,
        "rope_parameters": {**INTERLEAVED, "partial_rotary_factor": 1.0},
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    vision = {**TOWER, "num_position_embeddings": 256}
    model = _model(Qwen3_5ForConditionalGeneration, text, vision)
    return TinyModel(model, qwen3_processor())


def qwen3_processor(pixels: Mapping[str, int] = PIXELS) -> Qwen3VLProcessor:
    """Return the processor of Qwen3-VL, which Qwen3.5 shares."""
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(pixels), patch_size=PATCH),
        video_processor=Qwen3VLVideoProcessor(size=dict(pixels), patch_size=PATCH),
        tokenizer=VOCABULARY.tokenizer(),
    )


def _processor(kind: type[ProcessorMixin], pixels: Mapping[str, int]) -> ProcessorMixin:
    return kind(
        image_processor=Qwen2VLImageProcessor(size=dict(pixels)),
        video_processor=Qwen2VLVideoProcessor(size=dict(pixels)),
        tokenizer=VOCABULARY.tokenizer(),
    )
