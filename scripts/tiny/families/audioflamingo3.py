"""Audio-Flamingo-3: one sound, sent as metadata only."""

from transformers import (
    AudioFlamingo3Config,
    AudioFlamingo3ForConditionalGeneration,
    AudioFlamingo3Processor,
    WhisperFeatureExtractor,
)

from epd.tools.models.model import TinyModel, text_config, vision_config
from epd.tools.models.vocabulary import Vocabulary
from epd.tools.models.weights import INNER_MODELS

VOCABULARY = Vocabulary(special=("<sound>",), placeholders={"audio": "<sound>"})


def build() -> TinyModel:
    config = AudioFlamingo3Config(
        architectures=["AudioFlamingo3ForConditionalGeneration"],
        text_config=text_config(VOCABULARY, model_type="qwen2"),
        audio_config=vision_config(),
        audio_token_id=VOCABULARY.id("<sound>"),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    processor = AudioFlamingo3Processor(
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=VOCABULARY.tokenizer(),
    )
    return TinyModel(
        AudioFlamingo3ForConditionalGeneration(config), processor, prefixes=INNER_MODELS
    )
