"""Columns of a model's encoder outputs."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

logger = logging.getLogger("vllm.ec_store")

LEVELS = "deepstack_visual_indexes"
"""Key of a vision configuration: each layer that it lists adds one width to the last dimension."""

POSITION_COLUMNS = {"qwen2_5_vl": 4, "qwen3_vl": 5, "qwen3_vl_moe": 5}
"""Columns that a model appends to images and videos if it prunes videos, by model type."""

MODALITIES = ("image", "audio", "video")
VISUAL = frozenset({"image", "video"})


class Widths:
    """Columns of the model's encoder outputs, by modality.

    Sources, in order of precedence: the operator's option, vLLM's measurement (it encodes a dummy
    item of each modality when a producer starts), the shapes that this engine's workers report when
    they encode an item, and the model's configuration.
    """

    def __init__(self, vllm_config: Any, stated: Mapping[str, int]) -> None:
        measured: Mapping[str, int] = vllm_config.ec_transfer_config.mm_encoder_output_widths
        self._known = {**measured, **stated}
        self._derived = {
            modality: derived_columns(vllm_config.model_config, modality) for modality in MODALITIES
        }

    def known_columns(self, modality: str) -> int | None:
        return self._known.get(modality) or self._derived.get(modality)

    def is_derived(self, modality: str) -> bool:
        """Return whether a worker should report the columns of this modality."""
        return modality not in self._known

    def learn_columns(self, modality: str, columns: int) -> None:
        """Record the columns that a worker reports. The first report counts."""
        if modality in self._known:
            return
        before = self.known_columns(modality)
        self._known[modality] = columns
        if before != columns:
            logger.info(
                "encoder outputs of modality %s have %d columns, and the configuration suggests "
                "%s; entries of the reported width are loaded from now on",
                modality,
                columns,
                before or "none",
            )


def derived_columns(model_config: Any, modality: str) -> int | None:
    """Return the columns that follow from the configuration; None if it does not determine them.

    Most encoders end in the width of the language model's embeddings. DeepStack models concatenate
    one such width for each level. Video pruning appends columns with positions.
    """
    width: int = model_config.get_inputs_embeds_size()
    visual = modality in VISUAL
    extra: int | None = 0
    multimodal = model_config.multimodal_config
    if visual and multimodal is not None and multimodal.is_multimodal_pruning_enabled():
        extra = POSITION_COLUMNS.get(model_config.hf_config.model_type)
    levels = list(_deepstack(model_config.hf_config.to_dict()))
    if extra is None or len(levels) > 1 or any(name != LEVELS for name, _ in levels):
        return None
    stacked = sum(len(layers) for _, layers in levels) if visual else 0
    return width * (1 + stacked) + extra


def _deepstack(config: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield all keys about DeepStack that have a value, at any depth."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _deepstack(value)
        elif "deepstack" in str(name) and value:
            yield str(name), value if isinstance(value, list | tuple) else [value]
