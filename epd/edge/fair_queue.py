"""Places for running requests, and a queue for others that is fair between tenants."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from epd.tenants import Tenant


@dataclass(slots=True, eq=False)
class Ticket:
    """Request in the queue or with a slot."""

    tenant: Tenant
    where: Literal["queue", "inside", "displaced"] = "queue"
    _called: asyncio.Event | None = None

    def call(self, where: Literal["inside", "displaced"]) -> None:
        self.where = where
        if self._called is not None:
            self._called.set()

    async def wait(self) -> None:
        if self.where == "queue":
            self._called = asyncio.Event()
            await self._called.wait()


class FairQueue:
    """Bounded slots and a bounded queue, fair between tenants.

    A free slot goes to the oldest request of the next tenant, in round robin. If the queue is
    full, a new request replaces the newest request of the tenant with the most queued requests. So
    no tenant can lock out another one, and no slot is reserved and unused.
    """

    def __init__(self, slots: int, queue: int) -> None:
        self.inside = 0
        self.waiting = 0
        self._slots = slots
        self._queue = queue
        self._lines: dict[Tenant, dict[Ticket, None]] = {}
        """Queues per tenant, none of them empty; the first one is next. Each queue is a dict,
        because a request may leave from any position."""

    def enter_queue(self, tenant: Tenant) -> Ticket | None:
        """Return a ticket, with a slot or in the queue. It must be passed to `leave_queue` once.

        Return None if the queue has no room for this tenant.
        """
        if self.inside < self._slots:  # then the queue is empty
            self.inside += 1
            return Ticket(tenant, "inside")
        if self.waiting >= self._queue and not self._make_room(tenant):
            return None
        ticket = Ticket(tenant)
        self._lines.setdefault(tenant, {})[ticket] = None
        self.waiting += 1
        return ticket

    def leave_queue(self, ticket: Ticket) -> None:
        """Release the ticket's slot, or remove it from the queue."""
        if ticket.where == "queue":
            self._unqueue(ticket)
        elif ticket.where == "inside":
            self.inside -= 1
            if self._lines:
                self._fill()

    def _fill(self) -> None:
        while self._lines and self.inside < self._slots:
            tenant, line = next(iter(self._lines.items()))
            ticket = next(iter(line))
            self._unqueue(ticket)
            if line:
                self._lines[tenant] = self._lines.pop(tenant)  # behind the others
            self.inside += 1
            ticket.call("inside")

    def _make_room(self, tenant: Tenant) -> bool:
        longest = max(self._lines.values(), key=len, default={})
        # If the longest line exceeds the tenant's own by at most 1, a swap would gain nothing.
        if len(longest) <= len(self._lines.get(tenant, ())) + 1:
            return False
        last = next(reversed(longest))
        self._unqueue(last)
        last.call("displaced")
        return True

    def _unqueue(self, ticket: Ticket) -> None:
        line = self._lines[ticket.tenant]
        del line[ticket]
        if not line:
            del self._lines[ticket.tenant]
        self.waiting -= 1
