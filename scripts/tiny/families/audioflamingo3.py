"""Audio-Flamingo-3: one sound, sent as metadata only."""

from transformers import (
    AudioFlamingo3ForConditionalGeneration,
    AudioFlamingo3Processor,
    WhisperFeatureExtractor,
)

from epd.tools.models.model import TinyModel, model_of, text_config, vision_config
from epd.tools.models.vocabulary import Vocabulary
from epd.tools.models.weights import INNER_MODELS

VOCABULARY = Vocabulary(special=("<sound>",), placeholders={"audio": "<sound>"})


def build() -> TinyModel:
    model = model_of(
        AudioFlamingo3ForConditionalGeneration,
        text_config=text_config(VOCABULARY, model_type="qwen2"),
        audio_config=vision_config(),
        audio_token_id=VOCABULARY.id("<sound>"),
    )
    processor = AudioFlamingo3Processor(
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=VOCABULARY.tokenizer(),
    )
    return TinyModel(model, processor, prefixes=INNER_MODELS)
