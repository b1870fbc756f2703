"""A store from its URL."""

from urllib.parse import urlsplit

from ec_store.base import Store
from ec_store.config import redacted
from ec_store.disk_config import DiskConfig
from ec_store.redis_url import redis_options

DISK = ("file",)
REDIS = ("redis", "rediss", "redis+cluster", "rediss+cluster")

FETCH_THREADS = {**dict.fromkeys(DISK, 4), **dict.fromkeys(REDIS, 16)}
"""Entries that a connector fetches at once, by scheme. Reading from memory keeps a core busy, and
takes a second one for large entries. Waiting for a server takes none; there are as many idle
connections (`ec_store.redis_link.MAX_IDLE`)."""


def open_store(url: str, *, create: bool = True, lazy: bool = False) -> Store:
    """Open a store.

    Args:
        url: `file:///path?max_bytes=64GiB&ttl=7d&durability=none`, `redis://…`, `rediss://…` or
            `redis+cluster://…`; docs/configuration.md lists the parameters of each.
        create: whether a directory is made into a store where it is none.
        lazy: whether a directory is opened by the first use, and again by the next one after each
            failure. Redis always is.

    Raises:
        ValueError: the URL is none of these, or has an unknown or wrong parameter.
        StoreMissing: there is no store in the directory, and none is made.
        StoreUnavailable: the store cannot be used.
    """
    scheme = urlsplit(url).scheme
    # A backend is imported when it is wanted: whoever uses the disk needs no Redis client.
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
    """The URL, where `open_store` would take it; nothing is opened.

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
    """Return how many threads suit the store of a URL that `open_store` takes."""
    return FETCH_THREADS[urlsplit(url).scheme]


def _no_store(url: str) -> ValueError:
    return ValueError(
        f"{redacted(url)!r} is no store: file://, redis://, rediss://, redis+cluster://"
    )
