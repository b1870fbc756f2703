"""Parameters of transfers between instances: a small class for each connector. Pure."""

from typing import Literal

KVTransferName = Literal[
    "nixl", "nixl-push", "mooncake", "lmcache", "multi", "example", "offloading", "none"
]

ECTransferName = Literal["store", "example", "nixl", "mooncake"]
