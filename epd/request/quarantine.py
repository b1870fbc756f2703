"""Quarantine: requests that may end instances wait for each other (`epd.routing.fatal`)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from epd.routing.fatal import FatalRequests, Watched, in_quarantine

MAX_WAITING = 16
"""Upper bound of a tenant's requests that wait in line. Their bodies are in memory."""


@dataclass(slots=True)
class _Line:
    """Line of one tenant's requests, of which `requests` are in it, the first one with the lock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Lines of requests in quarantine, by tenant. Belongs to one event loop."""

    _fatal: FatalRequests
    _lines: dict[str, _Line] = field(default_factory=dict)

    def context_for(self, watched: Watched) -> AbstractAsyncContextManager[None]:
        """Return the context in which a request must be sent."""
        return self._wait_in_line(watched) if self._fatal.is_quarantined(watched) else nullcontext()

    @asynccontextmanager
    async def _wait_in_line(self, watched: Watched) -> AsyncIterator[None]:
        """Wait in line, and restrict the request, unless its kind is proven then.

        Raises:
            SuspectedFatal: too many requests wait.
        """
        line = self._lines.setdefault(watched.tenant, _Line())
        if line.requests > MAX_WAITING:
            raise in_quarantine("proxy")
        line.requests += 1
        try:
            async with line.lock:
                if self._fatal.restrict(watched):
                    yield
                    return
        finally:
            line.requests -= 1
            if not line.requests:
                del self._lines[watched.tenant]
        yield
