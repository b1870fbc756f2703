"""Qwen2.5-VL-7B at full size, with a tokenizer of bytes."""

from epd.tools.models.model import TinyModel
from epd.tools.models.qwen import ROPE
from epd.tools.models.qwen_vl import qwen2_5_vl
from epd.tools.models.weights import GAINS

WIDTH = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
DEPTH = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
POSITIONS = {"rope_parameters": {**ROPE, "mrope_section": [16, 24, 24]}}
TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
WINDOWS = {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2}
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28}
DEEP_GAINS = {**GAINS, "o_proj": 2.0}
"""Gains for dozens of layers: those of tiny models would add up."""


def build() -> TinyModel:
    """Return the model on PyTorch's current device, without its final weights."""
    text = {**WIDTH, **DEPTH, **POSITIONS, "max_position_embeddings": 32768}
    vision = {**TOWER, **WINDOWS, "out_hidden_size": WIDTH["hidden_size"]}
    return qwen2_5_vl(text, vision, PIXELS, DEEP_GAINS)
