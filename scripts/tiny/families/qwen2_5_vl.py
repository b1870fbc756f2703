"""Qwen2.5-VL: pictures and videos, sent as metadata alone."""

from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from scripts.tiny.families.qwen import ROPE, VOCABULARY
from scripts.tiny.model import HIDDEN, TinyModel, text_config
from scripts.tiny.vocabulary import END, START

PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 640 * 28 * 28}


def build() -> TinyModel:
    """A tiny Qwen2.5-VL."""
    config = Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config=text_config(
            VOCABULARY,
            rope_parameters=ROPE,
            bos_token_id=VOCABULARY.id(START),
            eos_token_id=VOCABULARY.id(END),
        ),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 128,
            "out_hidden_size": HIDDEN,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        image_token_id=VOCABULARY.id("<|image_pad|>"),
        video_token_id=VOCABULARY.id("<|video_pad|>"),
        vision_start_token_id=VOCABULARY.id("<|vision_start|>"),
        vision_end_token_id=VOCABULARY.id("<|vision_end|>"),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=PIXELS),
        video_processor=Qwen2VLVideoProcessor(size=PIXELS),
        tokenizer=VOCABULARY.tokenizer(),
    )
    return TinyModel(Qwen2_5_VLForConditionalGeneration(config), processor)
