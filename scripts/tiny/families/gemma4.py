"""Gemma 4 without its audio tower: pictures and videos, sent raw."""

from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
)

from epd.tools.models.model import TinyModel, model_of, text_config, vision_config
from epd.tools.models.vocabulary import START, Vocabulary

TOKENS = 70
"""Tokens of a picture, and of a frame of a video."""
VOCABULARY = Vocabulary(
    special=("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>"),
    placeholders={"image": "<|image|>", "video": "<|video|>"},
    names={
        "bos_token": START,
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
)


def build() -> TinyModel:
    model = model_of(
        Gemma4ForConditionalGeneration,
        text_config=text_config(
            VOCABULARY,
            head_dim=64,
            global_head_dim=64,
            layer_types=["sliding_attention", "full_attention"],
            vocab_size_per_layer_input=VOCABULARY.size,
            hidden_size_per_layer_input=0,
        ),
        vision_config=vision_config(
            num_key_value_heads=4, head_dim=16, default_output_length=TOKENS
        ),
        audio_config=None,
        boi_token_id=VOCABULARY.id("<|image>"),
        eoi_token_id=VOCABULARY.id("<image|>"),
        image_token_id=VOCABULARY.id("<|image|>"),
        video_token_id=VOCABULARY.id("<|video|>"),
        boa_token_id=VOCABULARY.id("<|audio>"),
        eoa_token_index=VOCABULARY.id("<audio|>"),
        audio_token_id=VOCABULARY.id("<|audio|>"),
    )
    processor = Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(max_soft_tokens=TOKENS),
        video_processor=Gemma4VideoProcessor(),
        tokenizer=VOCABULARY.tokenizer(),
    )
    return TinyModel(model, processor)
