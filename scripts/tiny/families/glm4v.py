"""GLM-4.1V: pictures, and one video, sent raw."""

from transformers import (
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
)

from epd.tools.models.model import TinyModel, model_of, text_config
from epd.tools.models.qwen import TOWER
from epd.tools.models.vocabulary import Vocabulary

PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 512 * 28 * 28}
VOCABULARY = Vocabulary(
    special=(
        "<|image|>",
        "<|video|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
    ),
    placeholders={
        "image": "<|begin_of_image|><|image|><|end_of_image|>",
        "video": "<|begin_of_video|><|video|><|end_of_video|>",
    },
)


def build() -> TinyModel:
    model = model_of(
        Glm4vForConditionalGeneration,
        text_config=text_config(
            VOCABULARY,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 6, 6],
            },
        ),
        vision_config=TOWER,
        image_token_id=VOCABULARY.id("<|image|>"),
        video_token_id=VOCABULARY.id("<|video|>"),
        image_start_token_id=VOCABULARY.id("<|begin_of_image|>"),
        image_end_token_id=VOCABULARY.id("<|end_of_image|>"),
        video_start_token_id=VOCABULARY.id("<|begin_of_video|>"),
        video_end_token_id=VOCABULARY.id("<|end_of_video|>"),
    )
    processor = Glm4vProcessor(
        image_processor=Glm4vImageProcessor(size=PIXELS),
        video_processor=Glm4vVideoProcessor(size=PIXELS),
        tokenizer=VOCABULARY.tokenizer(),
    )
    return TinyModel(model, processor)
