"""The transfers there are, by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from epd.transfer.ec import ECTransfer, Example, Store
from epd.transfer.ec_mooncake import ECMooncake
from epd.transfer.ec_nixl import ECNixl
from epd.transfer.kv import KVTransfer
from epd.transfer.lmcache import LMCache
from epd.transfer.mooncake import Mooncake
from epd.transfer.nixl import Multi, Nixl, NixlPush
from epd.transfer.untold import Untold

KVTransferName = Literal[
    "nixl",
    "nixl-push",
    "mooncake",
    "lmcache",
    "multi",
    "example",
    "offloading",
    "none",
]

KV_TRANSFERS: Mapping[KVTransferName, type[KVTransfer]] = MappingProxyType(
    {
        "nixl": Nixl,
        "nixl-push": NixlPush,
        "mooncake": Mooncake,
        "lmcache": LMCache,
        "multi": Multi,
        "example": Untold,
        "offloading": Untold,
        "none": Untold,
    }
)

ECTransferName = Literal["store", "example", "nixl", "mooncake"]

EC_TRANSFERS: Mapping[ECTransferName, type[ECTransfer]] = MappingProxyType(
    {"store": Store, "example": Example, "nixl": ECNixl, "mooncake": ECMooncake}
)
