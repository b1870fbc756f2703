"""Gemma 3: pictures, sent raw."""

from transformers import (
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
)

from epd.tools.models.model import TinyModel, model_of, text_config, vision_config
from epd.tools.models.vocabulary import START, Vocabulary
from epd.tools.models.weights import TOWER_PREFIX

SIDE, PATCH = 112, 14
TOKENS = 16
"""Tokens of a picture: its 64 patches are pooled by four."""
VOCABULARY = Vocabulary(
    # vLLM looks up line feeds as tokens; those around two pictures are adjacent.
    special=(
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        *("\n" * count for count in (4, 3, 2, 1)),
    ),
    placeholders={"image": "<start_of_image>"},
    names={
        "bos_token": START,
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
)


def build() -> TinyModel:
    model = model_of(
        Gemma3ForConditionalGeneration,
        text_config=text_config(
            VOCABULARY,
            head_dim=64,
            query_pre_attn_scalar=64,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config=vision_config(image_size=SIDE, patch_size=PATCH, vision_use_head=False),
        mm_tokens_per_image=TOKENS,
        boi_token_index=VOCABULARY.id("<start_of_image>"),
        eoi_token_index=VOCABULARY.id("<end_of_image>"),
        image_token_index=VOCABULARY.id("<image_soft_token>"),
    )
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=VOCABULARY.tokenizer(),
        image_seq_length=TOKENS,
    )
    return TinyModel(model, processor, prefixes=TOWER_PREFIX)
