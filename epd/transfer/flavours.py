"""The transfers there are, by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from epd.transfer.ec import ECTransfer, Example, Store
from epd.transfer.ec_mooncake import ECMooncake
from epd.transfer.ec_nixl import ECNixl
from epd.transfer.kv import KVTransfer
from epd.transfer.nixl import Nixl

KVTransferName = Literal["nixl"]

KV_TRANSFERS: Mapping[KVTransferName, type[KVTransfer]] = MappingProxyType({"nixl": Nixl})

ECTransferName = Literal["store", "example", "nixl", "mooncake"]

EC_TRANSFERS: Mapping[ECTransferName, type[ECTransfer]] = MappingProxyType(
    {"store": Store, "example": Example, "nixl": ECNixl, "mooncake": ECMooncake}
)
