"""Opening of a store by its URL."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from ec_store.aio import THREADS, AsyncStore, on_thread
from ec_store.arena.remote_url import SCHEMES as REMOTE
from ec_store.arena.remote_url import remote_options
from ec_store.arena.tier import SharedTier, Tier
from ec_store.arena.url import arena_options
from ec_store.backends import find_backend
from ec_store.base import Store
from ec_store.concurrency import DaemonPool
from ec_store.config import redacted

if TYPE_CHECKING:
    from ec_store.arena.aio_store import AsyncArenaStore

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


def open_tiers(urls: Sequence[str]) -> dict[str, Tier]:
    """Open the stores behind a host's memory, each by its URL, at most two.

    Returns:
        The tiers by the schemes of their URLs, in their order.

    Raises:
        ValueError: a URL cannot be a tier, or not in this place.
    """
    tiers = {urlsplit(url).scheme: open_tier(url) for url in urls}
    shared = [isinstance(tier, SharedTier) for tier in tiers.values()]
    if len(tiers) < len(urls) or shared not in ([], [False], [True], [False, True]):
        raise ValueError(
            "the tiers of a memory are a directory (file://), a store that hosts share (redis://, "
            "mooncake://), or both in this order"
        )
    return tiers


def open_tier(url: str) -> Tier:
    """Open a store behind a host's memory by its URL; its first use connects or opens it.

    Raises:
        ValueError: its store is no tier, or the URL has an unknown or invalid parameter.
    """
    tier = find_backend(url).open(url, True, True)
    if isinstance(tier, Tier):
        return tier
    tier.close()
    raise ValueError(f"{redacted(url)!r} cannot be a tier: use file://, redis:// or mooncake://")


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
    scheme = urlsplit(url).scheme
    if scheme in REMOTE:
        from ec_store.arena.remote_store import RemoteArenaStore  # noqa: PLC0415

        return RemoteArenaStore(remote_options(url))
    if scheme == "shm":
        from ec_store.arena.aio_store import AsyncArenaStore  # noqa: PLC0415

        return AsyncArenaStore.from_options(arena_options(url))
    return await open_async_store(url, create=False, lazy=True)
