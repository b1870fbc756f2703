"""Registry of the transfers by their names in `--kv-transfer` and `--ec-transfer`.

Another package adds a transfer by an entry point: a subclass of KVTransfer in the group
`epd.kv_transfers`, an ECTransfer in `epd.ec_transfers`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from epd.transfer.ec import ECMooncake, ECTransfer
from epd.transfer.kv import KVTransfer, LMCache, WithoutParams
from epd.transfer.mooncake import Mooncake
from epd.transfer.nixl import Multi, Nixl, NixlPush

KV_GROUP = "epd.kv_transfers"
EC_GROUP = "epd.ec_transfers"

KV_TRANSFERS: Mapping[str, type[KVTransfer]] = {
    "nixl": Nixl,
    "nixl-push": NixlPush,
    "mooncake": Mooncake,
    "lmcache": LMCache,
    "multi": Multi,
    "example": WithoutParams,
    "offloading": WithoutParams,
    "none": WithoutParams,
}

EC_TRANSFERS: Mapping[str, ECTransfer] = {
    "store": ECTransfer(stored=True),
    "example": ECTransfer(),
    "nixl": ECTransfer(handle=("peer_host", "peer_port", "size_bytes", "shape")),
    "mooncake": ECMooncake(pushed=True),
}


def load_kv_transfer(name: str) -> KVTransfer:
    """Return a transfer of KV blocks, of this package or of an entry point.

    Raises:
        ValueError: no transfer has this name, or its package cannot be used.
    """
    kind = KV_TRANSFERS.get(name) or _plugin(KV_GROUP, name, tuple(KV_TRANSFERS))
    if isinstance(kind, type) and issubclass(kind, KVTransfer):
        return kind()
    raise ValueError(f"the entry point {name!r} of {KV_GROUP} is no subclass of KVTransfer")


def load_ec_transfer(name: str) -> ECTransfer:
    """Return a transfer of encoder outputs, of this package or of an entry point.

    Raises:
        ValueError: no transfer has this name, or its package cannot be used.
    """
    transfer = EC_TRANSFERS.get(name) or _plugin(EC_GROUP, name, tuple(EC_TRANSFERS))
    if isinstance(transfer, ECTransfer):
        return transfer
    raise ValueError(f"the entry point {name!r} of {EC_GROUP} is no ECTransfer")


@cache
def _plugin(group: str, name: str, known: Sequence[str]) -> Any:
    """Return the object of an entry point. Cached: this reads the metadata of all packages."""
    plugins = entry_points(group=group)
    if name not in plugins.names:
        raise ValueError(
            f"there is no transfer {name!r}, only {', '.join([*known, *sorted(plugins.names)])}"
        )
    try:
        return plugins[name].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the entry point {name!r} of {group}: {error}") from error
