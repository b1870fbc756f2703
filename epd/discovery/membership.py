"""Membership of the instances of a running proxy, from all sources outside the configuration.

One source is in this module: registrations, by this process and by others that share the store.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import NamedTuple

import structlog

from epd.aio import Background
from epd.config.sections.instances import InstanceSettings
from epd.discovery.dns import DnsNames
from epd.discovery.entries import MAX_INSTANCES
from epd.discovery.stores import (
    Edit,
    Instances,
    RegistrationsInRedis,
    RegistrationsOnPage,
    RegistrationStore,
    StoreFailed,
)
from epd.discovery.watching import Watch, WatchedFile, WatchedNames
from epd.routing.instances import Instance
from epd.routing.registry import InstanceSource, Registry
from epd.shared_page import SharedPage
from epd.state_log import StateLog
from epd.upstream import Upstream

POLL_S = 0.5
"""Interval of reading the store: the maximum delay of a registration by another process."""


class Clash(Exception):
    """An instance conflicts with registered ones. The message has the reason."""


class Registrations:
    """Registers instances, and takes over the registrations of other processes.

    A failed read changes nothing. An instance that cannot be written is not registered.
    """

    def __init__(
        self, store: RegistrationStore | None, registry: Registry, interval_s: float = POLL_S
    ) -> None:
        """Register instances in a store; None: in this process alone."""
        self.interval_s = interval_s
        self._store = store
        self._registry = registry
        self._known: Instances = ()
        self._queue = asyncio.Lock()
        self._complaint = StateLog("the store of registrations cannot be used")

    async def add(self, instance: Instance) -> bool:
        """Register an instance or its new details; return False if its URL was known before.

        Raises:
            Clash: it was registered with another role, or conflicts with another instance.
            StoreFailed: it could not be stored.
        """
        async with self._queue:
            await self._read()
            before = next((member for member in self._known if member.url == instance.url), None)
            if before != instance:
                self._check(instance, before)
                await self._write(Edit(instance.url, instance))
                structlog.get_logger("epd").info(
                    "registered", instance=instance.url, role=instance.role
                )
            return before is None

    async def remove(self, url: str) -> bool:
        """Remove a registration; return False if there is none.

        Raises:
            StoreFailed: it could not be removed.
        """
        async with self._queue:
            await self._read()
            if all(member.url != url for member in self._known):
                return False
            await self._write(Edit(url))
            structlog.get_logger("epd").info("unregistered", instance=url)
            return True

    async def look(self) -> None:
        """Take over the stored registrations; keep the present ones after a failure."""
        async with self._queue:
            try:
                await self._read()
            except StoreFailed as error:
                self._complaint.record_failure(str(error))
            else:
                self._complaint.record_success()

    async def _write(self, edit: Edit) -> None:
        if self._store is None:
            self._take(edit.edited_instances(self._known))
        else:
            self._take(await self._store.write(self._known, edit))

    async def _read(self) -> None:
        if self._store is None:
            return
        found = await self._store.read()
        if found is None:  # the store has lost its data, or is new
            found = await self._store.write(self._known) if self._known else ()
        self._take(found)

    def _take(self, instances: Instances) -> None:
        if instances != self._known:
            self._known = instances
            self._registry.replace(InstanceSource.API, instances)

    def _check(self, instance: Instance, before: Instance | None) -> None:
        if before is not None and before.role is not instance.role:
            raise Clash(f"it is registered as {before.role}: unregister it first")
        if (other := self._registry.conflicting_member(instance)) is not None:
            raise Clash(f"{instance.role} conflicts with the {other.role} instance {other.url}")
        if before is None and len(self._known) >= MAX_INSTANCES:
            raise Clash(f"{MAX_INSTANCES} instances are registered already")


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


async def follow(source: Watch, begun: asyncio.Event) -> None:
    """Look at a source periodically. Set `begun` after the first look."""
    while True:
        await source.look()
        begun.set()
        await asyncio.sleep(source.interval_s)


def _watches(
    config: InstanceSettings, registry: Registry, upstream: Upstream, pages: SourcePages | None
) -> Iterator[Watch]:
    if config.instances_file is not None:
        yield WatchedFile(config.instances_file, registry, pages and pages.last_file)
    if config.discovered_instances:
        look_up = DnsNames(config.discovery_dns_server).resolve_addresses
        last = pages and pages.last_names
        yield WatchedNames(config.discovered_instances, look_up, registry, upstream, last)
