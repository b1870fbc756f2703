"""Registrations of instances: by this process, and by others that share the store."""

import asyncio

import structlog

from epd.discovery.complaint import Complaint
from epd.discovery.entries import MAX_INSTANCES
from epd.discovery.stores import Edit, Instances, Store, StoreFailed
from epd.routing.instances import Instance
from epd.routing.registry import Registry, Source

POLL_S = 0.5
"""Interval of reading the store: the maximum delay of a registration by another process."""


class Clash(Exception):
    """An instance conflicts with registered ones. The message has the reason."""


class Registrations:
    """Registers instances, and takes over the registrations of other processes.

    A failed read changes nothing. An instance that cannot be written is not registered.
    """

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._known: Instances = ()
        self._turn = asyncio.Lock()
        self._complaint = Complaint("the store of registrations cannot be used")

    async def add(self, instance: Instance) -> bool:
        """Register an instance or its new details; return False if its URL was known before.

        Raises:
            Clash: it was registered with another role, or conflicts with another instance.
            StoreFailed: it could not be stored.
        """
        async with self._turn:
            await self._read()
            before = next((one for one in self._known if one.url == instance.url), None)
            if before != instance:
                self._check(instance, before)
                self._take(await self._store.write(self._known, Edit(instance.url, instance)))
                structlog.get_logger("epd").info(
                    "registered", instance=instance.url, role=instance.role
                )
            return before is None

    async def remove(self, url: str) -> bool:
        """Remove a registration; return False if there is none.

        Raises:
            StoreFailed: it could not be removed.
        """
        async with self._turn:
            await self._read()
            if all(one.url != url for one in self._known):
                return False
            self._take(await self._store.write(self._known, Edit(url)))
            structlog.get_logger("epd").info("unregistered", instance=url)
            return True

    async def begin(self) -> None:
        """Take over the registrations of other processes."""
        await self.refresh()

    async def follow(self) -> None:
        """Do the same periodically."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the store; after a failure everything stays unchanged."""
        async with self._turn:
            try:
                await self._read()
            except StoreFailed as error:
                self._complaint.failed(str(error))
            else:
                self._complaint.well()

    async def _read(self) -> None:
        found = await self._store.read()
        if found is None:  # the store has lost its data, or is new
            found = await self._store.write(self._known) if self._known else ()
        self._take(found)

    def _take(self, instances: Instances) -> None:
        if instances != self._known:
            self._known = instances
            self._registry.replace(Source.API, instances)

    def _check(self, instance: Instance, before: Instance | None) -> None:
        if before is not None and before.role is not instance.role:
            raise Clash(f"it is registered as {before.role}: unregister it first")
        if (other := self._registry.clash(instance)) is not None:
            raise Clash(f"{instance.role} conflicts with the {other.role} instance {other.url}")
        if before is None and len(self._known) >= MAX_INSTANCES:
            raise Clash(f"{MAX_INSTANCES} instances are registered already")
