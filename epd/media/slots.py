"""Slots for downloads of media, shared fairly by tenants."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from epd.errors import Overloaded

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
    async def slot(self, tenant: str, wait_s: float) -> AsyncIterator[None]:
        """Wait for a slot, at most `wait_s` seconds, and hold it until the context exits.

        Raises:
            Overloaded: no slot was free in time.
        """
        tenant_slots = self._of_tenants.setdefault(tenant, asyncio.Semaphore(TENANT_SLOTS))
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(wait_s):
                    await stack.enter_async_context(tenant_slots)
                    await stack.enter_async_context(self._slots)
            except TimeoutError:
                raise Overloaded(
                    f"other downloads of media took all slots for {wait_s:.0f} s: send the request "
                    "again later, or send the media in it"
                ) from None
            yield
