"""What instances tell each other through the proxy: a small class for each connector. Pure."""

from typing import Literal

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

ECTransferName = Literal["store", "example", "nixl", "mooncake"]
