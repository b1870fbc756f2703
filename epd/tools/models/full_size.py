"""Qwen2.5-VL-7B and Qwen3-VL-8B at full size, with a tokenizer of bytes.

The dimensions are those of the published `config.json` of Qwen/Qwen2.5-VL-7B-Instruct and
Qwen/Qwen3-VL-8B-Instruct. The models are on PyTorch's current device, without final weights.
"""

from epd.tools.models.model import TinyModel
from epd.tools.models.qwen import ROPE
from epd.tools.models.qwen_vl import INTERLEAVED, qwen2_5_vl, qwen3_vl
from epd.tools.models.weights import GAINS

DEEP_GAINS = {**GAINS, "o_proj": 2.0}
"""Gains for dozens of layers: those of tiny models would add up."""


def qwen2_5_vl_7b() -> TinyModel:
    """Return Qwen2.5-VL-7B: 8.3 billion parameters."""
    text = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_parameters": {**ROPE, "mrope_section": [16, 24, 24]},
        "max_position_embeddings": 32768,
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "out_hidden_size": 3584,
    }
    pixels = {"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28}
    return qwen2_5_vl(text, vision, pixels, DEEP_GAINS)


def qwen3_vl_8b() -> TinyModel:
    """Return Qwen3-VL-8B: 8.8 billion parameters."""
    text = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {**INTERLEAVED, "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        "max_position_embeddings": 262144,
    }
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
        "out_hidden_size": 4096,
    }
    pixels = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
    return qwen3_vl(text, vision, pixels, DEEP_GAINS)
