"""Metadata of one step, from the scheduler's side to the workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from ec_store.device.region import Place, SharedRegion


class EntryLoad(NamedTuple):
    """Entry to put into the encoder cache.

    Attributes:
        raw: place of the bytes in the shared memory, or the bytes, uint8, as a torch tensor, which
            vLLM sends to several ranks through shared memory of its own (`ShmTensorArena`).
        dtype: dtype of the tensor, as `Entry.dtype`.
        shape: shape of the tensor.
    """

    raw: torch.Tensor | Place
    dtype: str
    shape: tuple[int, ...]


class Item(NamedTuple):
    """Modality and metadata of an item, without its tensor."""

    modality: str
    metadata: Mapping[str, Any]


@dataclass
class StepMetadata(ECConnectorMetadata):
    """Metadata that the workers need for one step.

    Attributes:
        loads: entries to put into the encoder cache, by identifier.
        items: items of new requests, by identifier.
        learn: modality by identifier of items that are encoded here, to report their width.
        shared: shared memory that loads may be in; None without one.
    """

    loads: dict[str, EntryLoad] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)
    learn: dict[str, str] = field(default_factory=dict)
    shared: SharedRegion | None = None
