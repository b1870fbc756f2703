"""Registry of the transfers by their names in `--kv-transfer` and `--ec-transfer`."""

from collections.abc import Mapping

from epd.transfer import ECTransferName, KVTransferName
from epd.transfer.ec import ECMooncake, ECTransfer
from epd.transfer.kv import KVTransfer, LMCache, WithoutParams
from epd.transfer.mooncake import Mooncake
from epd.transfer.nixl import Multi, Nixl, NixlPush

KV_TRANSFERS: Mapping[KVTransferName, type[KVTransfer]] = {
    "nixl": Nixl,
    "nixl-push": NixlPush,
    "mooncake": Mooncake,
    "lmcache": LMCache,
    "multi": Multi,
    "example": WithoutParams,
    "offloading": WithoutParams,
    "none": WithoutParams,
}

EC_TRANSFERS: Mapping[ECTransferName, ECTransfer] = {
    "store": ECTransfer(stored=True),
    "example": ECTransfer(),
    "nixl": ECTransfer(handle=("peer_host", "peer_port", "size_bytes", "shape")),
    "mooncake": ECMooncake(pushed=True),
}
