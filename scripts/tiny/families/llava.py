"""LLaVA 1.5 and LLaVA-OneVision: pictures, and with OneVision videos, sent raw."""

from transformers import (
    CLIPImageProcessor,
    LlavaForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
)

from epd.tools.models.model import TinyModel, model_of, text_config, vision_config
from epd.tools.models.vocabulary import Vocabulary
from epd.tools.models.weights import TOWER_PREFIX

SIDE, PATCH = 112, 14
SEQUENCE = (SIDE // PATCH) ** 2
SIZE = {"height": SIDE, "width": SIDE}
VOCABULARY = Vocabulary(
    special=("<image>", "<video>"),
    placeholders={"image": "<image>\n", "video": "<video>\n"},
    names={"image_token": "<image>", "video_token": "<video>"},
)


def llava() -> TinyModel:
    model = model_of(
        LlavaForConditionalGeneration,
        text_config=text_config(
            VOCABULARY, model_type="llama", architectures=["LlamaForCausalLM"], head_dim=64
        ),
        vision_config=vision_config(
            model_type="clip_vision_model", image_size=SIDE, patch_size=PATCH, projection_dim=64
        ),
        image_token_index=VOCABULARY.id("<image>"),
        image_seq_length=SEQUENCE,
        vision_feature_layer=-1,
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIZE),
        tokenizer=VOCABULARY.tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return TinyModel(model, processor, prefixes=TOWER_PREFIX)


def llava_onevision() -> TinyModel:
    pinpoints = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    model = model_of(
        LlavaOnevisionForConditionalGeneration,
        text_config=text_config(VOCABULARY, model_type="qwen2"),
        vision_config=vision_config(
            model_type="siglip_vision_model",
            image_size=SIDE,
            patch_size=PATCH,
            vision_use_head=False,
        ),
        image_token_index=VOCABULARY.id("<image>"),
        video_token_index=VOCABULARY.id("<video>"),
        image_grid_pinpoints=pinpoints,
    )
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=SIZE, image_grid_pinpoints=pinpoints),
        video_processor=LlavaOnevisionVideoProcessor(size=SIZE),
        tokenizer=VOCABULARY.tokenizer(),
        num_image_tokens=SEQUENCE,
        vision_feature_select_strategy="full",
    )
    return TinyModel(model, processor, prefixes=TOWER_PREFIX)
