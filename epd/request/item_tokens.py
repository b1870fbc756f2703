"""Tokens of media items: reported counts, and predictions for items without one. Pure.

An encode instance reports the number of an item's tokens in its placeholder metadata, with the
models that have such metadata. A prediction need not be exact: the speeds of encode instances are
learned in predicted tokens.
"""

import math
from collections.abc import Mapping
from typing import Any

from epd.api.items import MMItem

MERGED = 4
"""Number of patches that become one token in Qwen's models, the ones that report a grid."""

TYPICAL_TOKENS = {"image": 1024, "audio": 512, "video": 4096}
"""Estimated tokens of an item without a reported count or a known size, by modality."""

PIXELS_PER_TOKEN = 28 * 28
"""Pixels of one token in Qwen2-VL and Qwen2.5-VL, assumed of all models."""

LEAST_TOKENS = 64
"""Fewest predicted tokens of a picture: an encode of fewer takes about as long. Otherwise icons of
a few tokens would teach a time of each token by which a photo takes minutes."""


def media_tokens(metadata: Mapping[str, Any]) -> int:
    """Return the number of an item's tokens by its placeholder metadata; 0 if they have none."""
    for name, value in metadata.items():
        if not value:
            continue
        if name.endswith("_grid_thw"):  # patches of one item, or of one row
            return int(math.prod(value[0] if isinstance(value[0], list) else value)) // MERGED
        if name.endswith("_num_tokens"):
            return int(value[0])
    return 0


def predict_tokens(item: MMItem) -> int:
    """Return the expected number of an item's tokens, by its size if it is known."""
    if not item.pixels:
        return TYPICAL_TOKENS[item.modality]
    return max(LEAST_TOKENS, round(item.pixels / PIXELS_PER_TOKEN))
