"""Opening of a store by its URL."""

from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from ec_store.aio import THREADS, AsyncStore, on_thread
from ec_store.arena.url import arena_options
from ec_store.backends import find_backend
from ec_store.base import Store
from ec_store.concurrency import DaemonPool
from ec_store.config import redacted

if TYPE_CHECKING:
    from ec_store.arena.aio_store import AsyncArenaStore
    from ec_store.arena.tier import Tier

ProxyStore: TypeAlias = "AsyncStore | AsyncArenaStore"
"""Store of a proxy: its calls run on threads, or on the event loop without a wait."""


def open_store(
    url: str,
    *,
    create: bool = True,
    lazy: bool = False,
) -> Store:
    """Open a store by its URL.

    Args:
        url: `file:///path?max_bytes=64GiB&ttl=7d`, `shm:///path/of/socket`,
            `redis://…`, `rediss://…`, `redis+cluster://…`, or of another scheme that is
            registered (`ec_store.backends`); docs/configuration/store.md lists the parameters.
        create: whether to create a store in a directory without one.
        lazy: whether the first use opens the directory, and the next use after each failure reopens
            it. The other stores are always opened lazily.

    Raises:
        ValueError: the URL has another scheme, or an unknown or invalid parameter.
        StoreMissing: the directory has no store, and `create` is not set.
        StoreUnavailable: the store cannot be used.
    """
    store = find_backend(url).open(url, create, lazy)
    if not isinstance(store, Store):
        text = f"{redacted(url)!r} is only a tier: `ec-store serve shm://… --tier URL`"
        raise ValueError(text)  # noqa: TRY004 - the URL is wrong
    return store


def open_tier(url: str) -> "Tier":
    """Open the store behind a host's memory by its URL; it connects at its first use.

    Raises:
        ValueError: its store is no tier, or the URL has an unknown or invalid parameter.
    """
    from ec_store.arena.tier import SharedTier  # noqa: PLC0415

    tier = find_backend(url).open(url, True, True)
    if not isinstance(tier, SharedTier):
        tier.close()
        text = f"{redacted(url)!r} cannot be a tier: use redis:// or mooncake://"
        raise ValueError(text)  # noqa: TRY004 - the URL is wrong
    return tier


async def open_async_store(url: str, *, create: bool = True, lazy: bool = False) -> AsyncStore:
    """Open a store by its URL on a thread.

    Args and errors are those of `open_store`.
    """
    pool = DaemonPool(THREADS, "ec-store")
    try:
        store = await on_thread(pool, lambda: open_store(url, create=create, lazy=lazy))
        return AsyncStore(store, pool)
    except BaseException:
        pool.close()
        raise


async def open_proxy_store(url: str) -> ProxyStore:
    """Open an existing store for a proxy: lazily, and without its payloads.

    The errors are those of `open_store`.
    """
    if urlsplit(url).scheme == "shm":
        from ec_store.arena.aio_store import AsyncArenaStore  # noqa: PLC0415

        return AsyncArenaStore(arena_options(url))
    return await open_async_store(url, create=False, lazy=True)
