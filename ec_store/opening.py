"""A store from its URL."""

from urllib.parse import urlsplit

from ec_store.base import Store
from ec_store.config import redacted


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
    if scheme == "file":
        from ec_store.shared_disk import SharedDiskStore  # noqa: PLC0415

        return SharedDiskStore.from_url(url)
    if scheme in {"redis", "rediss", "redis+cluster", "rediss+cluster"}:
        from ec_store.redis_store import RedisStore  # noqa: PLC0415

        return RedisStore.from_url(url)
    raise ValueError(
        f"{redacted(url)!r} is no store: file://, redis://, rediss://, redis+cluster://"
    )
