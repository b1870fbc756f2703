"""Places for admitted requests, with a fair queue for those that wait; rate limits of tenants."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from epd.tenants import Tenant


@dataclass(slots=True, eq=False)
class Slot:
    """Request in the queue or with a place."""

    tenant: Tenant
    where: Literal["queue", "inside", "sent_away"] = "queue"
    _called: asyncio.Event | None = None

    def call(self, where: Literal["inside", "sent_away"]) -> None:
        """End the wait of the ticket with this result."""
        self.where = where
        if self._called is not None:
            self._called.set()

    async def wait(self) -> None:
        """Wait until the ticket has a place or is removed from the queue."""
        if self.where == "queue":
            self._called = asyncio.Event()
            await self._called.wait()


class QueueFull(Exception):
    """Error: all places are taken, and the queue is full."""


class FairQueue:
    """Bounded places and a bounded queue, fair between tenants.

    A free place goes to the oldest request of the next tenant, in round robin. If the queue is
    full, a new request replaces the newest request of the tenant with the most queued requests. So
    no tenant can lock out another one, and no place is reserved and unused.
    """

    def __init__(self, places: int, queue: int) -> None:
        self.inside = 0
        self.waiting = 0
        self._places = places
        self._queue = queue
        self._lines: dict[Tenant, dict[Slot, None]] = {}
        """Queues per tenant, none of them empty; the first one is next. Each queue is a dict,
        because a request may leave from any position."""

    def enter_queue(self, tenant: Tenant) -> Slot:
        """Return a ticket, with a place or in the queue. It must be passed to `leave_queue` once.

        Raises:
            QueueFull: all places are taken, and the queue has no room for this tenant.
        """
        if self.inside < self._places:  # then the queue is empty
            self.inside += 1
            return Slot(tenant, "inside")
        ticket = Slot(tenant)
        if self.waiting >= self._queue:
            self._make_room(tenant)
        self._lines.setdefault(tenant, {})[ticket] = None
        self.waiting += 1
        return ticket

    def leave_queue(self, ticket: Slot) -> None:
        """Release the ticket's place, or remove it from the queue."""
        if ticket.where == "queue":
            self._unqueue(ticket)
        elif ticket.where == "inside":
            self.inside -= 1
            if self._lines:
                self._fill()

    def resize(self, places: int, queue: int) -> None:
        """Set the numbers of places and of queued requests. Present requests stay."""
        self._places = places
        self._queue = queue
        self._fill()

    def _fill(self) -> None:
        while self._lines and self.inside < self._places:
            self._enter_next()

    def _enter(self, ticket: Slot) -> None:
        self.inside += 1
        ticket.call("inside")

    def _enter_next(self) -> None:
        tenant, line = next(iter(self._lines.items()))
        ticket = next(iter(line))
        self._unqueue(ticket)
        if line:
            self._lines[tenant] = self._lines.pop(tenant)  # behind the others
        self._enter(ticket)

    def _make_room(self, tenant: Tenant) -> None:
        longest = max(self._lines.values(), key=len, default={})
        # If the longest line exceeds the tenant's own by at most 1, a swap would gain nothing.
        if len(longest) <= len(self._lines.get(tenant, ())) + 1:
            raise QueueFull
        last = next(reversed(longest))
        self._unqueue(last)
        last.call("sent_away")

    def _unqueue(self, ticket: Slot) -> None:
        line = self._lines[ticket.tenant]
        del line[ticket]
        if not line:
            del self._lines[ticket.tenant]
        self.waiting -= 1


MINUTE_S = 60.0


class RateLimiter:
    """Rate limit per tenant: a token bucket that fills at a constant rate.

    The bucket holds the tokens of one minute. So a tenant within its limit in each minute is never
    rejected, even if its requests come in bursts. After a pause, a tenant may send the requests of
    two minutes in one.
    """

    def __init__(self, per_minute: float) -> None:
        self._full = max(1.0, per_minute)
        self._per_s = per_minute / MINUTE_S
        self._buckets: dict[Tenant, tuple[float, float]] = {}
        """Tokens and the time of their count, in seconds. The keys file bounds the tenants."""

    def take_token(self, tenant: Tenant, now_s: float) -> float:
        """Return the seconds until the tenant's next request; 0 admits this one and counts it."""
        tokens, counted_s = self._buckets.get(tenant, (self._full, now_s))
        tokens = min(self._full, tokens + (now_s - counted_s) * self._per_s)
        admitted = tokens >= 1
        self._buckets[tenant] = (tokens - admitted, now_s)
        return 0.0 if admitted else (1 - tokens) / self._per_s
