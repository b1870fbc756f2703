"""Pixtral in LLaVA's format: pictures, sent raw. vLLM's model class writes into its configuration.

Like Pixtral-12B's in that format, the configuration names no architecture of the text model.
"""

from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
)

from scripts.tiny.model import TinyModel, text_config
from scripts.tiny.vocabulary import END, START, Vocabulary

PATCH = 16
VOCABULARY = Vocabulary(
    special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), placeholders={"image": "[IMG]"}
)


def build() -> TinyModel:
    """A tiny Pixtral."""
    config = LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        text_config=text_config(
            VOCABULARY,
            model_type="mistral",
            head_dim=64,
            bos_token_id=VOCABULARY.id(START),
            eos_token_id=VOCABULARY.id(END),
        ),
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 256,
            "patch_size": PATCH,
        },
        image_token_index=VOCABULARY.id("[IMG]"),
        image_seq_length=1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessor(
            size={"longest_edge": 256}, patch_size={"height": PATCH, "width": PATCH}
        ),
        tokenizer=VOCABULARY.tokenizer(),
        patch_size=PATCH,
    )
    return TinyModel(LlavaForConditionalGeneration(config), processor)
