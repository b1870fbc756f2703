"""A store from its URL."""

from urllib.parse import urlsplit

from ec_store.base import Store
from ec_store.config import redacted
from ec_store.disk_config import DiskConfig
from ec_store.redis_url import redis_options

DISK = ("file",)
REDIS = ("redis", "rediss", "redis+cluster", "rediss+cluster")


def open_store(url: str) -> Store:
    """Open a store.

    Args:
        url: `file:///path?max_bytes=64GiB&ttl=7d&durability=none`, `redis://…`, `rediss://…` or
            `redis+cluster://…`; docs/configuration.md lists the parameters of each.

    Raises:
        ValueError: the URL is none of these, or has an unknown or wrong parameter.
        StoreUnavailable: there is no such store.
    """
    scheme = urlsplit(url).scheme
    # A backend is imported when it is wanted: whoever uses the disk needs no Redis client.
    if scheme in DISK:
        from ec_store.shared_disk import SharedDiskStore  # noqa: PLC0415

        return SharedDiskStore.from_url(url)
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


def _no_store(url: str) -> ValueError:
    return ValueError(
        f"{redacted(url)!r} is no store: file://, redis://, rediss://, redis+cluster://"
    )
