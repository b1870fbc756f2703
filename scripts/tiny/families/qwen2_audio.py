"""Qwen2-Audio: sounds, sent as metadata only."""

from transformers import (
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from epd.tools.models.model import TinyModel, model_of, text_config
from epd.tools.models.qwen import VOCABULARY
from epd.tools.models.weights import INNER_MODELS

AUDIO = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}


def build() -> TinyModel:
    model = model_of(
        Qwen2AudioForConditionalGeneration,
        text_config=text_config(VOCABULARY, model_type="qwen2"),
        audio_config=AUDIO,
        audio_token_index=VOCABULARY.id("<|AUDIO|>"),
    )
    processor = Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=VOCABULARY.tokenizer(),
    )
    return TinyModel(model, processor, prefixes=INNER_MODELS)
