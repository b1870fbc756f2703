"""Opening of a store by its URL."""

from urllib.parse import urlsplit

from ec_store.base import Store
from ec_store.config import redacted
from ec_store.disk_config import DiskConfig
from ec_store.redis_url import redis_options

DISK = ("file",)
REDIS = ("redis", "rediss", "redis+cluster", "rediss+cluster")

FETCH_THREADS = {**dict.fromkeys(DISK, 4), **dict.fromkeys(REDIS, 16)}
"""Entries that a connector fetches at once, by scheme. Reading from memory keeps a core busy, and a
second core for large entries. Waiting for a server keeps none busy; a node keeps as many idle
connections (`ec_store.redis_link.MAX_IDLE`)."""


def open_store(url: str, *, create: bool = True, lazy: bool = False) -> Store:
    """Open a store by its URL.

    Args:
        url: `file:///path?max_bytes=64GiB&ttl=7d&durability=none`, `redis://…`, `rediss://…` or
            `redis+cluster://…`; docs/configuration.md lists the parameters of each.
        create: whether to create a store in a directory without one.
        lazy: whether the first use opens the directory, and the next use after each failure reopens
            it. Redis is always opened lazily.

    Raises:
        ValueError: the URL has another scheme, or an unknown or invalid parameter.
        StoreMissing: the directory has no store, and `create` is not set.
        StoreUnavailable: the store cannot be used.
    """
    scheme = urlsplit(url).scheme
    # A backend is imported at its first use: a store on disk needs no Redis client.
    if scheme in DISK:
        from ec_store.shared_disk import SharedDiskStore  # noqa: PLC0415

        if lazy:
            return SharedDiskStore(DiskConfig.from_url(url), create=create)
        return SharedDiskStore.from_url(url, create=create)
    if scheme in REDIS:
        from ec_store.redis_store import RedisStore  # noqa: PLC0415

        return RedisStore.from_url(url)
    raise _no_store(url)


def check_url(url: str) -> str:
    """Check that `open_store` accepts a URL, and return it; nothing is opened.

    Raises:
        ValueError: as `open_store`.
    """
    scheme = urlsplit(url).scheme
    if scheme in DISK:
        DiskConfig.from_url(url)
    elif scheme in REDIS:
        redis_options(url)
    else:
        raise _no_store(url)
    return url


def fetch_threads(url: str) -> int:
    """Return the default number of fetch threads for the store of a valid URL."""
    return FETCH_THREADS[urlsplit(url).scheme]


def _no_store(url: str) -> ValueError:
    return ValueError(
        f"{redacted(url)!r} is not the URL of a store: use file://, redis://, rediss://, "
        "redis+cluster:// or rediss+cluster://"
    )
