"""Registrations of instances, by this process and by others that share the store."""

import asyncio

import structlog

from epd.discovery.entries import MAX_INSTANCES
from epd.discovery.stores import (
    Edit,
    Instances,
    RegistrationStore,
    StoreFailed,
)
from epd.routing.instances import Instance
from epd.routing.registry import InstanceSource, Registry
from epd.state_log import StateLog

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
        self._complaint = StateLog("the store of registrations")

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
