"""Bytes of a model's weights and of a step of its encoders.

The weights are read from the headers of a checkpoint, the activations of a step are estimated from
`config.json`.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from epd.tools.up.model_config import MEDIA_WORDS, Config

VALUE_BYTES = 2
"""Bytes of a value: vLLM loads weights in bfloat16 or float16 unless they are quantized."""

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
    """

    weights: float
    encoders: float
    token: float


def model_sizes(config: Config, tensors: Mapping[str, float]) -> ModelSizes:
    """Return the sizes of a model; `tensors` has those of its checkpoint in bytes, by name."""
    config = next(_parts(config, "thinker_config"), config)
    towers = _parts(config, "vision_config", "audio_config")
    width = _number(_text_config(config), "hidden_size")
    encoders = (
        size for name, size in tensors.items() if any(word in name for word in ENCODER_WORDS)
    )
    token = max((_token_bytes(tower, width) for tower in towers), default=0)
    return ModelSizes(sum(tensors.values()), sum(encoders), token)


def _parts(config: Config, *names: str) -> Iterator[Config]:
    for name in names:
        if isinstance(part := config.get(name), Mapping):
            yield part


def _text_config(config: Config) -> Config:
    for part in _parts(config, "text_config", "llm_config"):
        return _text_config(part)
    return config


def _number(config: Config, *names: str) -> float:
    """Return the first of these fields that is a number; 0: there is none."""
    found = (config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int | float) and value), 0)


def _token_bytes(tower: Config, out: float) -> float:
    """Return the bytes that the largest layer of an encoder keeps at once for an output token.

    For each position, a layer has its input and output, the attention's or the feed-forward part's
    gates and products at once, and the result has the width of the language model.
    """
    # Qwen2-VL calls its width `embed_dim`; its `hidden_size` is the width of the output.
    width = _number(tower, "embed_dim", "d_model", "hidden_size", "width")
    ratio = _number(tower, "mlp_ratio") or 4
    inner = _number(tower, "intermediate_size", "encoder_ffn_dim") or ratio * width
    positions = _number(tower, "spatial_merge_size") ** 2 or 4
    levels = tower.get("deepstack_visual_indexes")
    outputs = 1 + (len(levels) if isinstance(levels, list) else 0)
    out = _number(tower, "out_hidden_size", "output_dim") or out
    return VALUE_BYTES * (positions * (4 * width + 3 * inner) + 2 * outputs * out)


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
