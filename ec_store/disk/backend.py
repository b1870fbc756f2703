"""Backend of `file://`, a directory."""

from typing import TYPE_CHECKING

from ec_store.backends import Backend
from ec_store.disk.config import DiskConfig

if TYPE_CHECKING:
    from ec_store.disk.store import SharedDiskStore


def _open(url: str, create: bool, lazy: bool) -> "SharedDiskStore":
    from ec_store.disk.store import SharedDiskStore  # noqa: PLC0415

    store = SharedDiskStore(DiskConfig.from_url(url), create=create)
    if not lazy:
        store.check()
    return store


BACKEND = Backend(check=DiskConfig.from_url, open=_open)
