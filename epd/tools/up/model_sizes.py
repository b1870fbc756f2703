"""Bytes of a model's weights and of a step of its encoders.

The weights are read from the headers of a checkpoint, or estimated from `config.json`. The
activations of a step are always estimates.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.tools.model_config import (
    MEDIA_WORDS,
    VALUE_BYTES,
    Config,
    number,
    outputs_per_token,
    parts,
    text_config,
)

ENCODER_WORDS = (*MEDIA_WORDS, "connector", "merger", "mlp1", "multi_modal", "projector")
"""Words in the names of tensors that an encode instance loads."""

NOT_LOADED = ("talker.", "token2wav.", "code2wav.")
"""Prefixes of tensors that vLLM skips in a model with speech output."""

FLOAT_BYTES = {"F64": 8, "F32": 4}
"""Bytes of a value in a checkpoint that vLLM does not load in this precision."""

HEADER_BYTES = 100 * 2**20
"""Maximum length of a safetensors header, as in its specification."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model in bytes.

    Attributes:
        weights: weights of the whole model.
        encoders: weights of its encoders.
        token: activations of an encoder for each of its output tokens; 0: not known.
        estimated: whether the weights are estimates.
    """

    weights: float
    encoders: float
    token: float
    estimated: bool


def model_sizes(config: Config, tensors: Mapping[str, float] | None = None) -> ModelSizes:
    """Return the sizes of a model; `tensors` has those of its checkpoint in bytes, by name."""
    config = next(parts(config, "thinker_config"), config)
    towers = [*parts(config, "vision_config", "audio_config")]
    text = text_config(config)
    token = max((_token_bytes(tower, number(text, "hidden_size")) for tower in towers), default=0)
    if tensors:
        encoders = sum(size for name, size in tensors.items() if _of_encoder(name))
        return ModelSizes(sum(tensors.values()), encoders, token, estimated=False)
    encoders = sum(map(_tower_parameters, towers)) * VALUE_BYTES
    return ModelSizes(_text_bytes(text, config) + encoders, encoders, token, estimated=True)


def _of_encoder(name: str) -> bool:
    return any(word in name for word in ENCODER_WORDS)


def _width_and_inner(tower: Config) -> tuple[float, float]:
    """Return the width of an encoder's layers, and that of their feed-forward part.

    Qwen2-VL calls its width `embed_dim`; its `hidden_size` is the width of the output.
    """
    width = number(tower, "embed_dim", "d_model", "hidden_size", "width")
    ratio = number(tower, "mlp_ratio") or 4
    return width, number(tower, "intermediate_size", "encoder_ffn_dim") or ratio * width


def _tower_parameters(tower: Config) -> float:
    width, inner = _width_and_inner(tower)
    layers = number(tower, "depth", "num_hidden_layers", "encoder_layers", "num_layers")
    merged = width * number(tower, "spatial_merge_size") ** 2
    merger = merged * (merged + number(tower, "out_hidden_size"))
    return layers * (4 * width**2 + 3 * width * inner) + merger


def _token_bytes(tower: Config, out: float) -> float:
    """Return the bytes that the largest layer of an encoder keeps at once for an output token.

    For each position, a layer has its input and output, the attention's or the feed-forward part's
    gates and products at once, and the result has the width of the language model.
    """
    width, inner = _width_and_inner(tower)
    positions = number(tower, "spatial_merge_size") ** 2 or 4
    out = number(tower, "out_hidden_size", "output_dim") or out
    outputs = outputs_per_token(tower) * out
    return VALUE_BYTES * (positions * (4 * width + 3 * inner) + 2 * outputs)


def _text_bytes(text: Config, config: Config) -> float:
    """Return the bytes of a language model with its embeddings."""
    width, heads = number(text, "hidden_size"), number(text, "num_attention_heads")
    head = number(text, "head_dim") or (width / heads if heads else 0)
    kv_heads = number(text, "num_key_value_heads") or heads
    experts = number(text, "num_experts", "n_routed_experts", "num_local_experts")
    inner = number(text, "intermediate_size")
    if experts:
        inner = experts * (number(text, "moe_intermediate_size") or inner)
        inner += number(text, "shared_expert_intermediate_size")
    layer = width * head * (2 * heads + 2 * kv_heads) + 3 * width * inner
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))
    embeddings = number(text, "vocab_size") * width * (1 if tied else 2)
    layers = number(text, "num_hidden_layers") * layer
    return layers * _weight_bits(text, config) / 8 + embeddings * VALUE_BYTES


def _weight_bits(*configs: Config) -> float:
    """Return the bits of a weight of a linear layer."""
    for quantized in (part for config in configs for part in parts(config, "quantization_config")):
        if "fp8" in str(quantized.get("quant_method")):
            return 8
        groups = quantized.get("config_groups")
        first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if bits := number(quantized, "bits", "w_bit") or number(weights or {}, "num_bits"):
            return bits
    return 8 * VALUE_BYTES


def checkpoint_tensors(folder: Path) -> Mapping[str, float] | None:
    """Return the bytes of each tensor as vLLM loads it; None: no complete safetensors checkpoint.

    Only the headers of the files are read.
    """
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [folder / name for name in sorted(set(named))]
        else:
            files = [folder / "model.safetensors"]
        return {name: size for file in files for name, size in _header(file)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def _header(file: Path) -> Iterator[tuple[str, float]]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > HEADER_BYTES:
            raise ValueError(f"{file}: the header has {length} bytes")
        header = json.loads(opened.read(length))
    for name, tensor in header.items():
        if name != "__metadata__" and not name.startswith(NOT_LOADED):
            start, end = tensor["data_offsets"]
            yield name, (end - start) * VALUE_BYTES / FLOAT_BYTES.get(tensor["dtype"], VALUE_BYTES)
