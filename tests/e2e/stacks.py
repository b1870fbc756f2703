"""The stacks that tests run on.

Not in `conftest.py`: pytest loads that under another name than tests import it by, and a `Spec` of
the one would be no `Spec` of the other, so that stacks would be started twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epd.routing.instances import Role

VISION, AUDIO = "tiny-qwen2.5-vl", "tiny-qwen2-audio"
E_PD, E_P_D = "1e1pd", "1e1p1d"
DISK, REDIS, CLUSTER = "file", "redis", "cluster"

AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
"""With it, an engine in bfloat16 whose first prompt is short dies of an illegal instruction
(docs/decisions/003-cpu-stack.md)."""


@dataclass(frozen=True)
class Spec:
    """What a stack is made of.

    Attributes:
        model: its model.
        topology: its engines.
        store: where its encoder cache is.
        bf16: whether engines compute in bfloat16, and in float32 otherwise.
        ranks: over how many processes the encode engine's tensors are divided.
        consumer_ranks: the same for each of the other engines.
        traced: whether engines and proxy export spans.
        conversing: whether prefill reads what decode keeps of a conversation, and keeps nothing
            itself.
        programs: whether its engines are programs of their own, which each import vLLM, and not
            forked from a process that has.
    """

    model: str
    topology: str
    store: str
    bf16: bool = False
    ranks: int = 1
    consumer_ranks: int = 1
    traced: bool = False
    conversing: bool = False
    programs: bool = False

    def __str__(self) -> str:
        traits = ["bf16"] * self.bf16 + [f"tp{self.ranks}"] * (self.ranks > 1)
        traits += [f"consumer-tp{self.consumer_ranks}"] * (self.consumer_ranks > 1)
        traits += ["traced"] * self.traced + ["conversing"] * self.conversing
        return "-".join([self.model, self.topology, self.store, *traits])

    def flags(self) -> Mapping[Role, Sequence[str]]:
        """What the engines' command lines have beside those of every stack."""
        every = ["--trust-request-mm-kwargs", *(["--dtype", "bfloat16"] if self.bf16 else [])]
        own = {Role.PREFILL: ["--no-enable-prefix-caching"] * self.conversing}
        return {role: [*every, *self._ranks_of(role), *own.get(role, [])] for role in Role}

    def _ranks_of(self, role: Role) -> Sequence[str]:
        ranks = self.ranks if role is Role.ENCODE else self.consumer_ranks
        return ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []

    def kv_extra(self) -> Mapping[str, Any]:
        """What prefill and decode are told beside their connector."""
        if not self.conversing:
            return {}
        return {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": BLOCKS_TTL_S}


BLOCKS_TTL_S = 60
"""Longer than a test talks, short enough for decode's memory."""

ON_DISK = Spec(VISION, E_PD, DISK)
ON_REDIS = Spec(VISION, E_PD, REDIS, bf16=not AMX)
ON_CLUSTER = Spec(VISION, E_P_D, CLUSTER, ranks=2)
VISION_STACKS = [ON_DISK, ON_CLUSTER, ON_REDIS]
TRACED = Spec(AUDIO, E_P_D, DISK, traced=True, programs=True)
CONVERSING = Spec(VISION, E_P_D, DISK, conversing=True)
SHARDED = Spec(VISION, E_PD, DISK, consumer_ranks=2)
AUDIO_STACKS = [Spec(AUDIO, E_PD, DISK), TRACED]
MODELS = (
    "tiny-internvl",
    "tiny-paddleocr-vl",
    "tiny-paligemma",
    "tiny-pixtral",
    "tiny-qwen2.5-omni",
    "tiny-qwen3-omni",
    "tiny-qwen3-vl",
)
"""The models that only their own tests ask, on a stack each. `scripts/model_matrix.sh` has all."""
MODEL_STACKS = [Spec(model, E_PD, DISK) for model in MODELS]
STACKS = [*VISION_STACKS, *AUDIO_STACKS, CONVERSING, SHARDED, *MODEL_STACKS]


def on(*stacks: Spec) -> pytest.MarkDecorator:
    """Run a test on these stacks alone."""
    return pytest.mark.parametrize("stack", stacks, indirect=True, ids=str)
