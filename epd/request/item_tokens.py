"""Tokens of media items: reported counts, and predictions for items without one. Pure.

An encode instance reports the number of an item's tokens in its placeholder metadata, with the
models that have such metadata. A model need not have tokens in proportion to pixels: it may limit
the size of a picture, or scale all pictures to one size. Therefore the tokens per pixel are learned
separately for each class of size, which is a factor of 2 in pixels.
"""

import math
from collections.abc import Mapping
from typing import Any

from ec_store.bounded import BoundedDict

MERGED = 4
"""Number of patches that become one token in Qwen's models, the ones that report a grid."""

TYPICAL_TOKENS = {"image": 1024, "audio": 512, "video": 4096}
"""Estimated tokens of an item without a reported count, by modality."""

PIXELS_PER_TOKEN = 28 * 28
"""Pixels of one token in Qwen2-VL and Qwen2.5-VL, assumed of a model without reported counts."""

MAX_LEARNED = 64
"""Upper bound of the pairs of a model and a modality with learned counts."""

LATEST_WEIGHT = 0.1
"""Weight of the latest count in a moving mean."""


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


class TokenCounts:
    """Predicted tokens of items by their size, from the counts of encoded ones."""

    def __init__(self) -> None:
        # Tokens per pixel by class of size; under 0, tokens of an item of unknown size.
        self._means: BoundedDict[tuple[str | None, str], dict[int, float]] = BoundedDict(
            MAX_LEARNED
        )

    def predict_tokens(self, model: str | None, modality: str, pixels: int = 0) -> int:
        """Return the expected number of an item's tokens, at least 1; `pixels` is 0 if unknown."""
        means = self._means.get((model, modality), {})
        if not pixels:
            return max(1, round(means.get(0) or TYPICAL_TOKENS[modality]))
        size = pixels.bit_length()
        if size not in means:
            sizes = [known for known in means if known]
            size = min(sizes, key=lambda known: abs(known - size), default=0)
        per_pixel = means[size] if size else 1 / PIXELS_PER_TOKEN
        return max(1, round(pixels * per_pixel))

    def learn_tokens(self, model: str | None, modality: str, pixels: int, tokens: int) -> None:
        """Learn the reported number of an item's tokens; 0 for no report."""
        if not tokens:
            return
        means = self._means.setdefault((model, modality), {})
        self._means.move_to_end((model, modality))
        _add(means, 0, tokens)
        if pixels:
            _add(means, pixels.bit_length(), tokens / pixels)


def _add(means: dict[int, float], size: int, value: float) -> None:
    mean = means.get(size, value)
    means[size] = mean + LATEST_WEIGHT * (value - mean)
