"""Who is inside, who waits, and in which order."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from epd.tenants import Tenant


@dataclass(slots=True, eq=False)
class Ticket:
    """One request on its way in."""

    tenant: Tenant
    where: Literal["queue", "inside", "sent_away"] = "queue"
    _called: asyncio.Event | None = None

    def call(self, where: Literal["inside", "sent_away"]) -> None:
        """End its wait."""
        self.where = where
        if self._called is not None:
            self._called.set()

    async def wait(self) -> None:
        """Until it is called."""
        if self.where == "queue":
            self._called = asyncio.Event()
            await self._called.wait()


class QueueFull(Exception):
    """There is no place, and none to wait for one."""


class Door:
    """So many at once are inside; the others wait, first come, first served, tenants in turn.

    A place that becomes free goes to the next tenant's first request. In a full queue a newcomer
    takes the place of the last one of the tenant that has most waiting: no tenant's requests can
    keep another's out, and none has places set aside that nobody uses.
    """

    def __init__(self, places: int, queue: int) -> None:
        self.inside = 0
        self.waiting = 0
        self._places = places
        self._queue = queue
        self._lines: dict[Tenant, dict[Ticket, None]] = {}
        """No line is empty; the first one's turn is next. Dicts, as those who wait may leave."""

    def arrive(self, tenant: Tenant) -> Ticket:
        """A ticket, inside or waiting, to be given to `leave` once.

        Raises:
            QueueFull: it could not even wait.
        """
        if self.inside < self._places:  # nobody waits then
            self.inside += 1
            return Ticket(tenant, "inside")
        ticket = Ticket(tenant)
        if self.waiting >= self._queue:
            self._make_room(tenant)
        self._lines.setdefault(tenant, {})[ticket] = None
        self.waiting += 1
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give back its place, wherever it is."""
        if ticket.where == "queue":
            self._unqueue(ticket)
        elif ticket.where == "inside":
            self.inside -= 1
            if self._lines:
                self._fill()

    def resize(self, places: int, queue: int) -> None:
        """Have so many from now on. Who is inside or waits already, stays."""
        self._places = places
        self._queue = queue
        self._fill()

    def _fill(self) -> None:
        while self._lines and self.inside < self._places:
            self._enter_next()

    def _enter(self, ticket: Ticket) -> None:
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
        # A line as long would only change places with the newcomer's.
        if len(longest) <= len(self._lines.get(tenant, ())) + 1:
            raise QueueFull
        last = next(reversed(longest))
        self._unqueue(last)
        last.call("sent_away")

    def _unqueue(self, ticket: Ticket) -> None:
        line = self._lines[ticket.tenant]
        del line[ticket]
        if not line:
            del self._lines[ticket.tenant]
        self.waiting -= 1
