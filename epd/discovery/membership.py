"""Membership of the instances of a running proxy, from all sources outside the configuration."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import NamedTuple

from epd.aio import Background
from epd.config.sections.instances import InstanceSettings
from epd.discovery.dns import DnsNames
from epd.discovery.instances_file import WatchedFile
from epd.discovery.redis_store import RegistrationsInRedis
from epd.discovery.registrations import Registrations
from epd.discovery.stores import (
    RegistrationsOnPage,
    RegistrationStore,
)
from epd.discovery.watched_names import WatchedNames
from epd.discovery.watching import Watch, follow
from epd.routing.registry import Registry
from epd.shared_page import SharedPage
from epd.upstream import Upstream


class SourcePages(NamedTuple):
    """What the workers of one proxy share of the sources.

    Attributes:
        registrations: the registered instances, without Redis.
        last_file: last valid content of the file of instances, for a worker that replaces another.
        last_names: last addresses of the names, for the same.
    """

    registrations: SharedPage
    last_file: SharedPage
    last_names: SharedPage


BEGIN_S = 5.0
"""Maximum wait for the sources before requests are served, in seconds."""


@asynccontextmanager
async def membership(
    config: InstanceSettings,
    registry: Registry,
    upstream: Upstream,
    background: Background,
    pages: SourcePages | None = None,
) -> AsyncIterator[Registrations]:
    """Keep a registry up to date with the sources outside the configuration.

    The context starts after the first answer of every source, or after `BEGIN_S`. A source that
    raises is restarted, and its instances stay. The upstream client receives the expected
    certificate name of each address. `pages` are those of several workers.
    """
    async with AsyncExitStack() as stack:
        store: RegistrationStore | None = None
        if pages is not None:
            store = RegistrationsOnPage(pages.registrations)
        if config.registration_store is not None:
            connected = RegistrationsInRedis.connected(config.registration_store)
            store = await stack.enter_async_context(connected)
        registrations = Registrations(store, registry)
        sources = [*_watches(config, registry, upstream, pages)]
        if store is not None:
            sources.append(registrations)
        begun = [asyncio.Event() for _ in sources]
        for source, event in zip(sources, begun, strict=True):
            work = partial(follow, source, event)
            await stack.enter_async_context(background.run_task("membership", work))
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                for event in begun:
                    await event.wait()
        yield registrations


def _watches(
    config: InstanceSettings, registry: Registry, upstream: Upstream, pages: SourcePages | None
) -> Iterator[Watch]:
    if config.instances_file is not None:
        yield WatchedFile(config.instances_file, registry, pages and pages.last_file)
    if config.discovered_instances:
        look_up = DnsNames(config.discovery_dns_server).resolve_addresses
        last = pages and pages.last_names
        yield WatchedNames(config.discovered_instances, look_up, registry, upstream, last)
