"""All sources of instances of a proxy that runs."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from epd.config import ProxyConfig
from epd.discovery.registrations import Registrations
from epd.discovery.stores import InFolder, InProcess, Store, folder_of
from epd.discovery.watching import Memory, Watch, WatchedFile, WatchedNames
from epd.http.upstream import Upstream
from epd.routing.registry import Registry

BEGIN_S = 5.0
"""What the sources have to say before the first request is answered without it."""


@asynccontextmanager
async def membership(
    config: ProxyConfig, registry: Registry, upstream: Upstream
) -> AsyncIterator[Registrations]:
    """Have a registry follow the sources of a configuration, beside the configuration itself.

    Where there are none, nothing runs. Entered once each has said what it has to say.

    Returns:
        What instances are registered with.
    """
    async with opened(config.registration_store if config.dynamic_registration else None) as store:
        registrations = Registrations(store, registry)
        sources = [*_watches(config, registry, upstream)]
        if not isinstance(store, InProcess):
            sources.append(registrations)
        begun = [asyncio.create_task(source.begin()) for source in sources]
        if begun:
            await asyncio.wait(begun, timeout=BEGIN_S)
        tasks = [asyncio.create_task(_run(*pair)) for pair in zip(sources, begun, strict=True)]
        try:
            yield registrations
        finally:
            for task in (*begun, *tasks):
                task.cancel()
            ends = await asyncio.gather(*begun, *tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


async def _run(source: Watch, begun: asyncio.Task[None]) -> None:
    await begun
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
