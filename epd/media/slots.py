"""Slots for downloads of media, shared fairly by tenants."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

SLOTS = 64
"""Maximum number of concurrent downloads of a process."""

TENANT_SLOTS = SLOTS // 2
"""Maximum of one tenant, so that its slow origins leave slots for the others."""

REQUEST_SLOTS = 4
"""Maximum of one request."""


class DownloadSlots:
    """Slots of one process. Those of a tenant are given in the order of arrival."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SLOTS)
        # The semaphore of a tenant exists as long as a download uses it or waits for it.
        self._of_tenants: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it until the context exits."""
        own = self._of_tenants.setdefault(tenant, asyncio.Semaphore(TENANT_SLOTS))
        async with own, self._slots:
            yield
