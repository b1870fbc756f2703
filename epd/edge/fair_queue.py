"""Slots for running requests, and a queue for others that is fair between tenants."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from epd.tenants import Tenant


@dataclass(slots=True, eq=False)
class Ticket:
    """Request in the queue or with a slot."""

    tenant: Tenant
    state: Literal["queued", "running", "displaced"] = "queued"
    _ended: asyncio.Event | None = None

    def end_wait(self, state: Literal["running", "displaced"]) -> None:
        self.state = state
        if self._ended is not None:
            self._ended.set()

    async def wait(self) -> None:
        if self.state == "queued":
            self._ended = asyncio.Event()
            await self._ended.wait()


class FairQueue:
    """Bounded slots and a bounded queue, fair between tenants.

    A free slot goes to the oldest request of the next tenant, in round robin. If the queue is
    full, a new request replaces the newest request of the tenant with the most queued requests. So
    no tenant can lock out another one, and no slot is reserved and unused.
    """

    def __init__(self, slots: int, max_queued: int) -> None:
        self.running = 0
        self.queued = 0
        self._slots = slots
        self._max_queued = max_queued
        self._queues: dict[Tenant, dict[Ticket, None]] = {}
        """Queues per tenant, none of them empty; the first one is next. Each queue is a dict,
        because a request may leave from any position."""

    def enter_queue(self, tenant: Tenant) -> Ticket | None:
        """Return a ticket, with a slot or in the queue. It must be passed to `leave_queue` once.

        Return None if the queue has no room for this tenant.
        """
        if self.running < self._slots:  # then the queue is empty
            self.running += 1
            return Ticket(tenant, "running")
        if self.queued >= self._max_queued and not self._make_room(tenant):
            return None
        ticket = Ticket(tenant)
        self._queues.setdefault(tenant, {})[ticket] = None
        self.queued += 1
        return ticket

    def leave_queue(self, ticket: Ticket) -> None:
        """Release the ticket's slot, or remove it from the queue."""
        if ticket.state == "queued":
            self._unqueue(ticket)
        elif ticket.state == "running":
            self.running -= 1
            if self._queues:
                self._fill()

    def _fill(self) -> None:
        while self._queues and self.running < self._slots:
            tenant, queue = next(iter(self._queues.items()))
            ticket = next(iter(queue))
            self._unqueue(ticket)
            if queue:
                self._queues[tenant] = self._queues.pop(tenant)  # behind the others
            self.running += 1
            ticket.end_wait("running")

    def _make_room(self, tenant: Tenant) -> bool:
        longest = max(self._queues.values(), key=len, default={})
        # If the longest queue exceeds the tenant's own by at most 1, a swap would gain nothing.
        if len(longest) <= len(self._queues.get(tenant, ())) + 1:
            return False
        last = next(reversed(longest))
        self._unqueue(last)
        last.end_wait("displaced")
        return True

    def _unqueue(self, ticket: Ticket) -> None:
        queue = self._queues[ticket.tenant]
        del queue[ticket]
        if not queue:
            del self._queues[ticket.tenant]
        self.queued -= 1
