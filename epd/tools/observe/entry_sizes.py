"""Sizes of encoder outputs, from a model's `config.json` and the tokens that servers report. Pure.

Without reported tokens they are estimates: a picture has as many output tokens as it has merged
patches, once it has been scaled into the limits of the image processor (`smart_resize` in
transformers' Qwen2-VL processor), or a number that the configuration states for every picture.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from epd.json_or_none import json_or_none
from epd.tools.model_config import (
    VALUE_BYTES,
    Config,
    number,
    outputs_per_token,
    parts,
    text_config,
)

FIXED = ("mm_tokens_per_image", "image_seq_length", "image_seq_len")
"""Fields with the number of tokens of every picture: Gemma 3, LLaVA."""

TILED = ("downsample_ratio", "image_grid_pinpoints", "scale_factor")
"""Fields of models that cut a picture into tiles by rules of their own: InternVL, LLaVA-NeXT and
Idefics 3."""

MAX_EDGE = 16384
"""Largest value of a processor's size that is the length of an edge; larger ones are pixels."""


MAX_TOKENS = 10**7
"""Largest number of tokens that a server is believed; no model has so long a context."""

REPORTED = re.compile(rb'"multimodal_tokens":\s?(\{[^{}]*\})')
"""Tokens by modality in the usage of an answer. In a generated text, its quotes are escaped."""


@dataclass(frozen=True, slots=True)
class EntrySizes:
    """Rule for the sizes of a model's encoder outputs.

    Attributes:
        token_bytes: bytes of an output token.
        token_pixels: pixels of a token; 0 if the number of tokens does not follow from the pixels.
        fixed_tokens: tokens of every picture; 0 if they depend on it.
        least_pixels: a smaller picture is scaled up to this size.
        most_pixels: a larger picture is scaled down to this size.
    """

    token_bytes: float
    token_pixels: float
    fixed_tokens: float
    least_pixels: float = 0.0
    most_pixels: float = math.inf

    def image_bytes(self, pixels: float) -> float:
        """Return the bytes of a picture's output; 0 if they are not known."""
        if self.fixed_tokens:
            return self.fixed_tokens * self.token_bytes
        if not pixels or not self.token_pixels:
            return 0.0
        scaled = min(max(pixels, self.least_pixels), self.most_pixels)
        return max(1.0, scaled / self.token_pixels) * self.token_bytes


def entry_sizes(config: Config, processor: Config) -> EntrySizes | None:
    """Return the rule of a model; None if its configuration has no width of a token.

    Args:
        config: the model's `config.json`.
        processor: its `preprocessor_config.json`; empty without one.
    """
    config = next(parts(config, "thinker_config"), config)
    vision = next(parts(config, "vision_config"), {})
    text = text_config(config)
    width = number(vision, "out_hidden_size") or number(text, "hidden_size")
    if not width or not (vision or any(parts(config, "audio_config"))):
        return None
    token_bytes = VALUE_BYTES * outputs_per_token(vision) * width
    if any(name in part for name in TILED for part in (config, vision, text)):
        return EntrySizes(token_bytes, 0.0, 0.0)
    if tokens := number(config, *FIXED) or number(processor, *FIXED):
        return EntrySizes(token_bytes, 0.0, tokens)
    patch = number(vision, "patch_size", "spatial_patch_size")
    merge = number(vision, "spatial_merge_size") or number(config, "spatial_merge_size") or 1
    if not patch:
        return EntrySizes(token_bytes, 0.0, 0.0)
    size = next(parts(processor, "size"), {})
    least = number(processor, "min_pixels") or number(size, "shortest_edge")
    most = number(processor, "max_pixels") or number(size, "longest_edge")
    if 0 < most <= MAX_EDGE:
        least, most = 0.0, most * most
    return EntrySizes(token_bytes, (patch * merge) ** 2, 0.0, least, most or math.inf)


def reported_tokens(answer: bytes) -> Mapping[str, int]:
    """Return the tokens of a request's media by modality, from the end of vLLM's answer.

    vLLM reports them with `--enable-prompt-tokens-details`, in JSON and in the last event of a
    stream with usage. Empty without a report.
    """
    found = REPORTED.findall(answer)
    tokens = json_or_none(found[-1]) if found else None
    if not isinstance(tokens, dict):
        return {}
    return {
        name: number
        for name, number in tokens.items()
        if type(number) is int and 0 < number <= MAX_TOKENS
    }
