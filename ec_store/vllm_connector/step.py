"""What the scheduler's side tells the workers' for one step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from ec_store.device.region import Place, Shared


class Load(NamedTuple):
    """An entry to put into the encoder cache.

    Attributes:
        raw: where its bytes are in the shared memory, or the bytes, uint8: as a torch tensor, which
            vLLM sends to several ranks through shared memory of its own (`ShmTensorArena`).
        dtype: of the tensor, as `Entry.dtype`.
        shape: of the tensor.
    """

    raw: torch.Tensor | Place
    dtype: str
    shape: tuple[int, ...]


class Item(NamedTuple):
    """What is known of an item beside its tensor."""

    modality: str
    metadata: Mapping[str, Any]


@dataclass
class StepMetadata(ECConnectorMetadata):
    """What the workers need for one step.

    Attributes:
        loads: entries to put into the encoder cache, by identifier.
        items: of items that new requests bring, by identifier.
        learn: modality by identifier of items that are encoded here, to tell their width.
        shared: the memory that loads are in; None where there is none.
    """

    loads: dict[str, Load] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)
    learn: dict[str, str] = field(default_factory=dict)
    shared: Shared | None = None
