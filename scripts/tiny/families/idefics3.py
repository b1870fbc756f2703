"""Idefics3 and SmolVLM: pictures, sent raw."""

from typing import Any

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from epd.tools.models.model import TinyModel, text_config, vision_config
from epd.tools.models.vocabulary import PAD, Vocabulary

SIDE, PATCH = 112, 14
SEQUENCE = (SIDE // PATCH // 2) ** 2
ROWS = range(1, 7)
VOCABULARY = Vocabulary(
    special=(
        "<fake_token_around_image>",
        "<image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in ROWS for column in ROWS),
    ),
    placeholders={"image": "<image>"},
    size=384,
)
SIZES = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}


def sizes(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "text_config": text,
        "vision_config": vision_config(image_size=SIDE, patch_size=PATCH),
        "image_token_id": VOCABULARY.id("<image>"),
        "pad_token_id": VOCABULARY.id(PAD),
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def idefics3() -> TinyModel:
    config = Idefics3Config(
        architectures=["Idefics3ForConditionalGeneration"],
        **sizes(text_config(VOCABULARY, model_type="llama", head_dim=64)),
    )
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(**SIZES),
        tokenizer=VOCABULARY.tokenizer(),
        image_seq_len=SEQUENCE,
    )
    return TinyModel(Idefics3ForConditionalGeneration(config), processor)


def smolvlm() -> TinyModel:
    config = SmolVLMConfig(
        architectures=["SmolVLMForConditionalGeneration"],
        **sizes(text_config(VOCABULARY, model_type="llama", head_dim=64)),
    )
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**SIZES),
        video_processor=SmolVLMVideoProcessor(**SIZES),
        tokenizer=VOCABULARY.tokenizer(),
        image_seq_len=SEQUENCE,
    )
    return TinyModel(SmolVLMForConditionalGeneration(config), processor)
