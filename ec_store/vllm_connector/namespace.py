"""Which engines may share their encoder outputs."""

import hashlib
from typing import Any

import orjson

from ec_store.entry import FORMAT
from ec_store.vllm_connector.tensors import DTYPES

ENCODER_OPTIONS = (
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
"""Of vLLM's `MultiModalConfig`, what changes an encoder's outputs by more than rounding."""


def namespace_of(vllm_config: Any, name: str | None) -> str:
    """Which model made an entry: equal exactly where engines may share their encoder outputs.

    It covers the model's name or path and its revision, its whole configuration, the dtype, the
    quantization, the options of the processor and the encoder, and the format.

    Args:
        vllm_config: vLLM's configuration of this engine.
        name: stands for the model's name and revision, where an operator knows better. The rest is
            covered all the same: engines whose configurations differ share nothing.
    """
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    facts = {
        "format": FORMAT,
        "config": model.hf_config.to_dict(),
        "dtype": DTYPES[model.dtype],
        "quantization": model.quantization,
        "mm_processor_kwargs": multimodal and multimodal.mm_processor_kwargs,
        "encoder": {option: getattr(multimodal, option, None) for option in ENCODER_OPTIONS},
    }
    if name is None:
        facts |= {"model": model.model, "revision": model.revision}
        folder = str(model.model).rstrip("/").rpartition("/")[2]
        name = f"{folder}@{model.revision or 'main'}"
    else:
        # Where it was loaded from is what the name stands for.
        facts["config"].pop("_name_or_path", None)
    encoded = orjson.dumps(
        facts, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    )
    return f"{name}:{hashlib.sha256(encoded).hexdigest()[:16]}"
