"""Qwen2.5-Omni and Qwen3-Omni, only their thinkers: pictures, videos and sounds.

vLLM's model class of Qwen3-Omni writes into its configuration. Its pictures are sent raw. The
processor of Qwen2.5-Omni accepts no mixture of raw and metadata-only items in a request.
"""

from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from epd.tools.models.model import HIDDEN, TinyModel, text_config
from epd.tools.models.qwen import ROPE, TOWER
from epd.tools.models.vocabulary import Vocabulary
from scripts.tiny.families.qwen2_audio import AUDIO

THINKER = {"": "thinker."}
OMNI_AUDIO = {**AUDIO, "output_dim": HIDDEN}


def omni_vocabulary(image: str, video: str, audio: str, bos: str, eos: str) -> Vocabulary:
    """Return the vocabulary of an Omni model; its generations name tokens differently."""
    vision_bos, vision_eos = "<|vision_start|>", "<|vision_end|>"
    return Vocabulary(
        special=(vision_bos, vision_eos, image, video, bos, eos, audio),
        placeholders={
            "image": f"{vision_bos}{image}{vision_eos}",
            "video": f"{vision_bos}{video}{vision_eos}",
            "audio": f"{bos}{audio}{eos}",
        },
        names={
            "image_token": image,
            "video_token": video,
            "audio_token": audio,
            "vision_bos_token": vision_bos,
            "vision_eos_token": vision_eos,
            "audio_bos_token": bos,
            "audio_eos_token": eos,
        },
    )


QWEN2_5 = omni_vocabulary("<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
QWEN3 = omni_vocabulary(
    "<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"
)


def token_ids(vocabulary: Vocabulary, suffix: str) -> dict[str, int]:
    """Return the fields of a thinker for tokens: `suffix` ends the names of those of media."""
    ids = {name: vocabulary.id(token) for name, token in vocabulary.names.items()}
    return {
        **{f"{kind}_token_{suffix}": ids[f"{kind}_token"] for kind in ("image", "video", "audio")},
        "audio_start_token_id": ids["audio_bos_token"],
        "audio_end_token_id": ids["audio_eos_token"],
        "vision_start_token_id": ids["vision_bos_token"],
        "vision_end_token_id": ids["vision_eos_token"],
        "user_token_id": 0,
    }


def qwen2_5_omni() -> TinyModel:
    config = Qwen2_5OmniConfig(
        architectures=["Qwen2_5OmniModel"],
        thinker_config={
            "text_config": text_config(QWEN2_5, rope_parameters=ROPE),
            "audio_config": OMNI_AUDIO,
            "vision_config": {**TOWER, "window_size": 112, "fullatt_block_indexes": [1]},
            **token_ids(QWEN2_5, "index"),
            "tie_word_embeddings": False,
        },
        enable_audio_output=False,
        dtype="bfloat16",
    )
    pixels = {"shortest_edge": 56 * 56, "longest_edge": 256 * 28 * 28}
    processor = Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels),
        video_processor=Qwen2VLVideoProcessor(size=pixels),
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=QWEN2_5.tokenizer(),
    )
    model = Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config)
    return TinyModel(model, processor, config, THINKER)


def qwen3_omni() -> TinyModel:
    """Return a tiny Qwen3-Omni, dense: no layer has experts."""
    config = Qwen3OmniMoeConfig(
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
        thinker_config={
            "text_config": text_config(
                QWEN3,
                head_dim=64,
                rope_parameters={**ROPE, "mrope_interleaved": True},
                mlp_only_layers=[0, 1],
            ),
            "audio_config": {**OMNI_AUDIO, "downsample_hidden_size": 16},
            "vision_config": {
                **TOWER,
                "num_position_embeddings": 256,
                # vLLM reads these two, which published configurations contain.
                "image_size": 256,
                "apply_vit_abs_pos_embed": True,
                "deepstack_visual_indexes": [0],
            },
            **token_ids(QWEN3, "id"),
            "tie_word_embeddings": False,
        },
        enable_audio_output=False,
        dtype="bfloat16",
    )
    pixels = {"shortest_edge": 64 * 64, "longest_edge": 256 * 32 * 32}
    processor = Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels, patch_size=16),
        video_processor=Qwen2VLVideoProcessor(size=pixels, patch_size=16),
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=QWEN3.tokenizer(),
    )
    model = Qwen3OmniMoeThinkerForConditionalGeneration(config.thinker_config)
    return TinyModel(model, processor, config, THINKER)
