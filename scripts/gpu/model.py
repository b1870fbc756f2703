"""Write Qwen2.5-VL-7B at full size with seeded random weights and a tokenizer of bytes.

    python -m scripts.gpu.model FOLDER

The weights take 16.6 GB. They are drawn on a GPU if PyTorch finds one.
"""

import sys
from pathlib import Path

import torch

from scripts.tiny.families.qwen import ROPE
from scripts.tiny.families.qwen_vl import qwen2_5_vl
from scripts.tiny.model import TinyModel
from scripts.tiny.weights import GAINS

WIDTH = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
DEPTH = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
POSITIONS = {"rope_parameters": {**ROPE, "mrope_section": [16, 24, 24]}}
TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
WINDOWS = {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2}
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28}
DEEP_GAINS = {**GAINS, "o_proj": 2.0}
"""Gains for dozens of layers: those of tiny models would add up."""


def build() -> TinyModel:
    """Build the model on PyTorch's current device, without its final weights."""
    text = {**WIDTH, **DEPTH, **POSITIONS, "max_position_embeddings": 32768}
    vision = {**TOWER, **WINDOWS, "out_hidden_size": WIDTH["hidden_size"]}
    return qwen2_5_vl(text, vision, PIXELS, DEEP_GAINS)


if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = build()
    model.write(Path(sys.argv[1]))
