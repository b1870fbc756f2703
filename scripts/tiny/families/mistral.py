"""Pixtral in LLaVA's format, and Mistral 3: pictures, sent raw.

vLLM's model class of Pixtral writes into its configuration. Like the configuration of Pixtral-12B
in that format, this one names no architecture of the text model.
"""

from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedConfig,
)

from epd.tools.models.model import TinyModel, text_config, vision_config
from epd.tools.models.vocabulary import Vocabulary

SIDE, PATCH = 256, 16
VOCABULARY = Vocabulary(
    special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), placeholders={"image": "[IMG]"}
)


def pixtral() -> TinyModel:
    config = configuration(
        LlavaConfig,
        architectures=["LlavaForConditionalGeneration"],
        image_seq_length=1,
        vision_feature_select_strategy="full",
    )
    return TinyModel(LlavaForConditionalGeneration(config), pixtral_processor())


def mistral3() -> TinyModel:
    config = configuration(
        Mistral3Config,
        architectures=["Mistral3ForConditionalGeneration"],
        spatial_merge_size=2,
    )
    return TinyModel(
        Mistral3ForConditionalGeneration(config), pixtral_processor(spatial_merge_size=2)
    )


def configuration(kind: type[PreTrainedConfig], **more: object) -> PreTrainedConfig:
    return kind(
        text_config=text_config(VOCABULARY, model_type="mistral", head_dim=64),
        vision_config=vision_config(model_type="pixtral", image_size=SIDE, patch_size=PATCH),
        image_token_index=VOCABULARY.id("[IMG]"),
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        dtype="bfloat16",
        **more,
    )


def pixtral_processor(spatial_merge_size: int = 1) -> PixtralProcessor:
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(
            size={"longest_edge": SIDE}, patch_size={"height": PATCH, "width": PATCH}
        ),
        tokenizer=VOCABULARY.tokenizer(),
        patch_size=PATCH,
        spatial_merge_size=spatial_merge_size,
    )
