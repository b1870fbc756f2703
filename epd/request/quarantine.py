"""Quarantine: requests that may end instances wait for each other (`epd.routing.fatal`)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from epd.routing.fatal import FatalRequests
from epd.routing.watched import Watched, in_quarantine

MAX_WAITING = 16
"""Upper bound of a tenant's requests that wait for their turn. Their bodies are in memory."""


@dataclass(slots=True)
class _Turn:
    """Turn of one tenant's requests, of which `requests` hold it or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Turns of requests in quarantine, by tenant. Belongs to one event loop."""

    _fatal: FatalRequests
    _turns: dict[str, _Turn] = field(default_factory=dict)

    def context_for(self, watched: Watched) -> AbstractAsyncContextManager[None]:
        """Return the context in which a request must be sent."""
        return self._wait_turn(watched) if self._fatal.is_quarantined(watched) else nullcontext()

    @asynccontextmanager
    async def _wait_turn(self, watched: Watched) -> AsyncIterator[None]:
        """Wait for a turn, and restrict the request, unless its kind is proven then.

        Raises:
            SuspectedFatal: too many requests wait.
        """
        turn = self._turns.setdefault(watched.tenant, _Turn())
        if turn.requests > MAX_WAITING:
            raise in_quarantine("proxy")
        turn.requests += 1
        try:
            async with turn.lock:
                if self._fatal.restrict(watched):
                    yield
                    return
        finally:
            turn.requests -= 1
            if not turn.requests:
                del self._turns[watched.tenant]
        yield
