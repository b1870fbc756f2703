"""Idefics3 and SmolVLM: pictures, sent raw."""

from transformers import (
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedModel,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from epd.tools.models.model import TinyModel, model_of, text_config, vision_config
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


def idefics(kind: type[PreTrainedModel]) -> PreTrainedModel:
    return model_of(
        kind,
        text_config=text_config(VOCABULARY, model_type="llama", head_dim=64),
        vision_config=vision_config(image_size=SIDE, patch_size=PATCH),
        image_token_id=VOCABULARY.id("<image>"),
        pad_token_id=VOCABULARY.id(PAD),
        scale_factor=2,
    )


def idefics3() -> TinyModel:
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(**SIZES),
        tokenizer=VOCABULARY.tokenizer(),
        image_seq_len=SEQUENCE,
    )
    return TinyModel(idefics(Idefics3ForConditionalGeneration), processor)


def smolvlm() -> TinyModel:
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**SIZES),
        video_processor=SmolVLMVideoProcessor(**SIZES),
        tokenizer=VOCABULARY.tokenizer(),
        image_seq_len=SEQUENCE,
    )
    return TinyModel(idefics(SmolVLMForConditionalGeneration), processor)
