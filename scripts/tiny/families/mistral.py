"""Pixtral in LLaVA's format, and Mistral 3: pictures, sent raw.

vLLM's model class of Pixtral writes into its configuration. Like the configuration of Pixtral-12B
in that format, this one names no architecture of the text model.
"""

from transformers import (
    LlavaForConditionalGeneration,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedModel,
)

from epd.tools.models.model import TinyModel, model_of, text_config, vision_config
from epd.tools.models.vocabulary import Vocabulary

SIDE, PATCH = 256, 16
VOCABULARY = Vocabulary(
    special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), placeholders={"image": "[IMG]"}
)


def pixtral() -> TinyModel:
    model = with_pixtral_tower(
        LlavaForConditionalGeneration, image_seq_length=1, vision_feature_select_strategy="full"
    )
    return TinyModel(model, pixtral_processor())


def mistral3() -> TinyModel:
    model = with_pixtral_tower(Mistral3ForConditionalGeneration, spatial_merge_size=2)
    return TinyModel(model, pixtral_processor(spatial_merge_size=2))


def with_pixtral_tower(kind: type[PreTrainedModel], **more: object) -> PreTrainedModel:
    return model_of(
        kind,
        text_config=text_config(VOCABULARY, model_type="mistral", head_dim=64),
        vision_config=vision_config(model_type="pixtral", image_size=SIDE, patch_size=PATCH),
        image_token_index=VOCABULARY.id("[IMG]"),
        vision_feature_layer=-1,
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
