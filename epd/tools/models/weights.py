"""Seeded random weights with which different media give different answers."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from transformers import PreTrainedModel

from epd.tools.models.vocabulary import LETTERS

SEED = 15
GAINS = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 4.0, "lm_head": 8.0}
"""Factors on 1/sqrt(fan-in).

Sharp attention makes single patches count. Flat attention would average all pictures to nearly the
same value. A loud `lm_head` keeps sampled tokens among the letters.
"""
TOWER_PREFIX = MappingProxyType({"model.vision_tower.": "model.vision_tower.vision_model."})
"""Prefix of the towers of CLIP and SigLIP, which transformers 5 names without the second part."""
INNER_MODELS = MappingProxyType(
    {
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
        "model.": "",
    }
)
"""Prefixes for the classes of vLLM that only know the names from before transformers 4.52."""
HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
HEAD_NORM_GAIN = 3.0
"""Gain for models that normalise queries and keys, which cancels the gains of their projections."""


def redraw(model: PreTrainedModel, first_byte: int = 0, gains: Mapping[str, float] = GAINS) -> None:
    """Draw all weight matrices. Those of transformers are too small to tell inputs apart.

    Args:
        model: model to change.
        first_byte: number of the token of byte 0, so that the model answers only with letters.
        gains: factors on 1/sqrt(fan-in), by the names of layers.
    """
    generator = torch.Generator(model.device).manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.zero_()
        elif name.endswith(HEAD_NORMS):
            parameter.data.fill_(HEAD_NORM_GAIN)
        elif parameter.ndim > 1:
            gain = gains.get(name.split(".")[-2], 1.0)
            std = gain / parameter[0].numel() ** 0.5
            parameter.data.normal_(std=std, generator=generator)
    output = model.get_output_embeddings().weight.data
    silence = torch.ones(len(output), dtype=torch.bool)
    silence[[first_byte + letter for letter in LETTERS]] = False
    output[silence] = 0


def renamed(
    weights: Mapping[str, torch.Tensor], prefixes: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights under the names that vLLM expects."""
    for name, weight in weights.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        yield prefixes.get(old, "") + name.removeprefix(old), weight.contiguous()
