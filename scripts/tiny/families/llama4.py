"""Llama 4: pictures, sent raw."""

from transformers import (
    Llama4ForConditionalGeneration,
    Llama4ImageProcessor,
    Llama4Processor,
)

from epd.tools.models.model import TinyModel, model_of, text_config, vision_config
from epd.tools.models.vocabulary import Vocabulary

SIDE, PATCH = 128, 16
VOCABULARY = Vocabulary(
    special=(
        "<|image|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|patch|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    ),
    placeholders={"image": "<|image|>"},
)


def build() -> TinyModel:
    model = model_of(
        Llama4ForConditionalGeneration,
        text_config=text_config(
            VOCABULARY,
            intermediate_size_mlp=256,
            head_dim=64,
            num_local_experts=2,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 0],
            layer_types=["chunked_attention", "full_attention"],
        ),
        vision_config=vision_config(
            hidden_size=128,
            intermediate_size=512,  # four patches become one token
            image_size=SIDE,
            patch_size=PATCH,
            vision_output_dim=128,
            projector_input_dim=128,
            projector_output_dim=128,
        ),
        boi_token_index=VOCABULARY.id("<|image_start|>"),
        eoi_token_index=VOCABULARY.id("<|image_end|>"),
        image_token_index=VOCABULARY.id("<|patch|>"),
    )
    processor = Llama4Processor(
        image_processor=Llama4ImageProcessor(size={"height": SIDE, "width": SIDE}, max_patches=4),
        tokenizer=VOCABULARY.tokenizer(),
        patch_size=PATCH,
    )
    return TinyModel(model, processor)
