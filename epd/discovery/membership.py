"""All sources of instances of a proxy that runs."""

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
"""What the sources have to say before the first request is answered without it."""


@asynccontextmanager
async def membership(
    config: ProxyConfig, registry: Registry, upstream: Upstream, background: Background
) -> AsyncIterator[Registrations]:
    """Have a registry follow the sources of a configuration, beside the configuration itself.

    Where there are none, nothing runs. Entered once each has said what it has to say.

    Args:
        config: names the sources.
        registry: told of the instances.
        upstream: told whose certificate each address has to show.
        background: runs each source; one that raises is restarted, and the instances stay.

    Returns:
        What instances are registered with.
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
    """Follow a source, from its beginning where it has not been seen yet."""
    if not begun.is_set():
        await source.begin()
        begun.set()
    await source.follow()


@asynccontextmanager
async def opened(url: str | None) -> AsyncIterator[Store]:
    """The store of a URL; without one, registrations end with the process."""
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
    """What several workers share what is known of instances by; None where there is nothing to.

    Where nothing else is configured, a folder that is gone with them.

    Raises:
        OSError: there is no room for one.
    """
    if config.registration_store is not None or not config.dynamic:
        yield config.registration_store
        return
    with tempfile.TemporaryDirectory(prefix="epd-instances-") as folder:
        yield f"file://{folder}"
