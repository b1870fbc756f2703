"""All sources of instances of a running proxy."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial

from epd.background import Background
from epd.config import ProxyConfig
from epd.discovery.registrations import Registrations
from epd.discovery.stores import InFolder, InProcess, Store, folder_of
from epd.discovery.watching import Memory, Watch, WatchedFile, WatchedNames
from epd.routing.registry import Registry
from epd.upstream.client import Upstream

BEGIN_S = 5.0
"""Maximum wait for the sources before requests are served, in seconds."""


@asynccontextmanager
async def membership(
    config: ProxyConfig, registry: Registry, upstream: Upstream, background: Background
) -> AsyncIterator[Registrations]:
    """Keep a registry up to date with the sources outside the configuration.

    The context starts after the first answer of every source, or after `BEGIN_S`. Without sources,
    nothing runs.

    Args:
        config: configuration of the sources.
        registry: registry to update.
        upstream: client; receives the expected certificate name of each address.
        background: runner of the sources. A source that raises is restarted, and its instances
            stay.

    Returns:
        The registrations.
    """
    async with opened(config.registration_store if config.dynamic_registration else None) as store:
        registrations = Registrations(store, registry)
        sources = [*_watches(config, registry, upstream)]
        if not isinstance(store, InProcess):
            sources.append(registrations)
        async with AsyncExitStack() as stack:
            begun = []
            for source in sources:
                begun.append(asyncio.Event())
                work = partial(_follow, source, begun[-1])
                await stack.enter_async_context(background.running("membership", work))
            with suppress(TimeoutError):
                async with asyncio.timeout(BEGIN_S):
                    for event in begun:
                        await event.wait()
            yield registrations


async def _follow(source: Watch, begun: asyncio.Event) -> None:
    """Follow a source. Only the first call begins with `begin`."""
    if not begun.is_set():
        await source.begin()
        begun.set()
    await source.follow()


@asynccontextmanager
async def opened(url: str | None) -> AsyncIterator[Store]:
    """Return the store of a URL; without a URL, one that ends with the process."""
    if url is None:
        yield InProcess()
    elif (folder := folder_of(url)) is not None:
        yield InFolder(folder)
    else:
        from epd.discovery.redis_store import InRedis  # noqa: PLC0415 - takes its time to load

        async with InRedis.connected(url) as store:
            yield store


def _watches(config: ProxyConfig, registry: Registry, upstream: Upstream) -> Iterator[Watch]:
    memory = Memory(folder_of(config.registration_store))
    if config.instances_file is not None:
        yield WatchedFile(config.instances_file, registry, memory)
    if config.discovered:
        from epd.discovery.names import Names  # noqa: PLC0415 - takes its time to load

        look_up, interval_s = (
            Names(config.discovery_dns_server).addresses,
            config.discovery_interval_s,
        )
        yield WatchedNames(config.discovered, look_up, interval_s, registry, upstream, memory)


@contextmanager
def shared_store(config: ProxyConfig) -> Iterator[str | None]:
    """Return the URL of the store that several workers share; None without dynamic instances.

    If none is configured, it is a temporary folder.

    Raises:
        OSError: the folder cannot be created.
    """
    if config.registration_store is not None or not config.dynamic:
        yield config.registration_store
        return
    with tempfile.TemporaryDirectory(prefix="epd-instances-") as folder:
        yield f"file://{folder}"
