"""InternVL in transformers' format: pictures and videos, sent raw."""

from transformers import (
    GotOcr2ImageProcessor,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
)

from epd.tools.models.model import TinyModel, model_of, text_config, vision_config
from epd.tools.models.vocabulary import Vocabulary

SIDE, PATCH = 112, 14
SEQUENCE = (SIDE // PATCH // 2) ** 2
"""Tokens of a tile."""
VOCABULARY = Vocabulary(
    special=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    placeholders={"image": "<IMG_CONTEXT>\n", "video": "<video>\n"},
    names={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)


def build() -> TinyModel:
    size = {"height": SIDE, "width": SIDE}
    model = model_of(
        InternVLForConditionalGeneration,
        text_config=text_config(VOCABULARY, model_type="qwen2"),
        vision_config=vision_config(
            image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH], layer_scale_init_value=1.0
        ),
        image_token_id=VOCABULARY.id("<IMG_CONTEXT>"),
        image_seq_length=SEQUENCE,
    )
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4),
        video_processor=InternVLVideoProcessor(size=size),
        tokenizer=VOCABULARY.tokenizer(),
        image_seq_length=SEQUENCE,
    )
    return TinyModel(model, processor)
