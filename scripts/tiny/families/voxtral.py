"""Voxtral: sounds, sent raw. Its tokenizer is mistral-common's.

vLLM expects the tower's weights under the names of Mistral's format, and biases of keys.
"""

import base64
import json

import torch
from mistral_common.tokens.tokenizers.base import SpecialTokens
from transformers import VoxtralForConditionalGeneration

from epd.tools.models.model import TinyModel, model_of, text_config, vision_config
from epd.tools.models.vocabulary import Vocabulary

TOWER, MISTRAL_TOWER = "model.audio_tower.", "mm_whisper_embeddings.whisper_encoder."
LAYERS = 2
SPECIAL = list(SpecialTokens)
VOCABULARY = Vocabulary(special=(), placeholders={})
SOUND = {
    "num_mel_bins": 128,
    "window_size": 400,
    "hop_length": 160,
}


def build() -> TinyModel:
    model = model_of(
        VoxtralForConditionalGeneration,
        text_config=text_config(
            VOCABULARY,
            model_type="llama",
            head_dim=64,
            bos_token_id=SPECIAL.index(SpecialTokens.bos),
            eos_token_id=SPECIAL.index(SpecialTokens.eos),
        ),
        audio_config=vision_config(
            intermediate_size=256,  # the projector combines four frames
            # vLLM reads these, which its reader of Mistral's format adds.
            **SOUND,
            sampling_rate=16_000,
            downsample_factor=4,
            encoder_head_dim=16,
            is_encoder_decoder=False,
            is_causal=False,
            block_pool_size=1,
            pos_embed="sinusoidal",
            global_log_mel_max=None,
        ),
        audio_token_id=SPECIAL.index(SpecialTokens.audio),
    )
    for layer in model.model.audio_tower.layers:
        layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.zeros(64))
    return TinyModel(
        model,
        first_byte=len(SPECIAL),
        prefixes={
            f"{TOWER}layers.{layer}.fc{number}.": f"{MISTRAL_TOWER}layers.{layer}.mlp.fc{number}."
            for layer in range(LAYERS)
            for number in (1, 2)
        }
        | {
            TOWER: MISTRAL_TOWER,
            "model.multi_modal_projector.linear_1.": "audio_language_adapter.0.",
            "model.multi_modal_projector.linear_2.": "audio_language_adapter.2.",
            "model.language_model.": "model.",
        },
        files={"tekken.json": tekken()},
    )


def tekken() -> str:
    """Return mistral-common's tokenizer file: the special tokens, then a token for each byte."""
    vocabulary = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    special = [
        {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL)
    ]
    return json.dumps(
        {
            "config": {
                "pattern": r"[\s\S]",
                "num_vocab_tokens": len(vocabulary),
                "default_vocab_size": len(vocabulary) + len(special),
                "default_num_special_tokens": len(special),
                "version": "v11",
            },
            "vocab": vocabulary,
            "special_tokens": special,
            "audio": {
                "sampling_rate": 16_000,
                "frame_rate": 12.5,
                "audio_encoding_config": SOUND,
                "chunk_length_s": 30.0,
            },
        }
    )
