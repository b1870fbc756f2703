"""Parts that the tiny Qwen2 models share."""

from epd.tools.models.model import HIDDEN
from epd.tools.models.vocabulary import Vocabulary

VOCABULARY = Vocabulary(
    special=(
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|audio_bos|>",
        "<|audio_eos|>",
        "<|AUDIO|>",
    ),
    placeholders={
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    },
)
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
"""Rotary positions in time, height and width, for attention heads of size 64."""
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": HIDDEN,
}
"""Vision tower since Qwen2.5-VL; GLM-4.1V has these fields too."""
