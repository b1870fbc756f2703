"""What the scheduler's side tells the workers' for one step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata


class Load(NamedTuple):
    """An entry to put into the encoder cache.

    Attributes:
        raw: its bytes, uint8.
        dtype: of the tensor, as `Entry.dtype`.
        shape: of the tensor.
    """

    raw: np.ndarray[Any, Any]
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
    """

    loads: dict[str, Load] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)
