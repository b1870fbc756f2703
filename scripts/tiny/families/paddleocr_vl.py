"""PaddleOCR-VL: pictures, sent raw. vLLM's model class writes into its configuration."""

from transformers import (
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessor,
    PaddleOCRVLProcessor,
)

from epd.tools.models.model import TinyModel, model_of, text_config, vision_config
from epd.tools.models.qwen import ROPE
from epd.tools.models.vocabulary import PAD, Vocabulary

VOCABULARY = Vocabulary(
    special=(
        "<|IMAGE_START|>",
        "<|IMAGE_END|>",
        "<|IMAGE_PLACEHOLDER|>",
        "<|VIDEO_PLACEHOLDER|>",
    ),
    placeholders={"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
    names={"image_token": "<|IMAGE_PLACEHOLDER|>"},
)


def build() -> TinyModel:
    model = model_of(
        PaddleOCRVLForConditionalGeneration,
        text_config=text_config(
            VOCABULARY, head_dim=64, rope_parameters=ROPE, pad_token_id=VOCABULARY.id(PAD)
        ),
        vision_config=vision_config(image_size=112),
        image_token_id=VOCABULARY.id("<|IMAGE_PLACEHOLDER|>"),
        video_token_id=VOCABULARY.id("<|VIDEO_PLACEHOLDER|>"),
        vision_start_token_id=VOCABULARY.id("<|IMAGE_START|>"),
        vision_end_token_id=VOCABULARY.id("<|IMAGE_END|>"),
    )
    processor = PaddleOCRVLProcessor(
        image_processor=PaddleOCRVLImageProcessor(
            size={"shortest_edge": 56 * 56, "longest_edge": 256 * 28 * 28}
        ),
        tokenizer=VOCABULARY.tokenizer(),
    )
    return TinyModel(
        model,
        processor,
        prefixes={
            "model.language_model.": "model.",
            "model.visual.": "visual.",
            "model.projector.": "mlp_AR.",
        },
    )
