"""The transfers there are, by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from epd.transfer.kv import KVTransfer
from epd.transfer.nixl import Nixl

KVTransferName = Literal["nixl"]

KV_TRANSFERS: Mapping[KVTransferName, type[KVTransfer]] = MappingProxyType({"nixl": Nixl})
