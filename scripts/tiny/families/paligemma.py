"""PaliGemma: one picture, sent raw. vLLM's model class writes into its configuration."""

from transformers import (
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    SiglipImageProcessor,
)

from epd.tools.models.model import HIDDEN, TinyModel, model_of, text_config, vision_config
from epd.tools.models.vocabulary import PAD, START, Vocabulary
from epd.tools.models.weights import TOWER_PREFIX

SIDE, PATCH = 224, 14
VOCABULARY = Vocabulary(
    # vLLM looks up the line feed as a token of this name. The processor adds 1152 tokens.
    special=("<image>", "\n"),
    placeholders={"image": ""},
    names={"bos_token": START, "image_token": "<image>"},
    size=1536,
)


def build() -> TinyModel:
    """Return a tiny PaliGemma, on Gemma 1: its embeddings need not be tied."""
    model = model_of(
        PaliGemmaForConditionalGeneration,
        text_config=text_config(
            VOCABULARY, model_type="gemma", head_dim=64, pad_token_id=VOCABULARY.id(PAD)
        ),
        vision_config=vision_config(
            model_type="siglip_vision_model",
            image_size=SIDE,
            patch_size=PATCH,
            vision_use_head=False,
        ),
        image_token_index=VOCABULARY.id("<image>"),
        vocab_size=VOCABULARY.size,
        projection_dim=HIDDEN,
        hidden_size=HIDDEN,
    )
    image_processor = SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    image_processor.image_seq_length = (SIDE // PATCH) ** 2
    processor = PaliGemmaProcessor(
        image_processor=image_processor, tokenizer=VOCABULARY.tokenizer()
    )
    return TinyModel(model, processor, prefixes=TOWER_PREFIX)
