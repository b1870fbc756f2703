"""Who comes in, who waits, and who is sent away, all before a body is read."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

from epd.edge.door import Door, QueueFull, Ticket
from epd.edge.limits import Limits
from epd.edge.pace import Pace
from epd.errors import Overloaded, TooManyRequests, TryLater
from epd.tenants import Tenant

Reason = Literal[
    "tenant_rate", "tenant_requests", "queue_full", "queue_timeout", "body_bytes", "tenant_bytes"
]

REFUSALS: Mapping[Reason, tuple[type[TryLater], str, str]] = {
    "tenant_rate": (TooManyRequests, "rate_limited", "your key has had its requests per minute"),
    "tenant_requests": (
        TooManyRequests,
        "rate_limited",
        "your key has as many requests at once as it may have",
    ),
    "queue_full": (TooManyRequests, "queue_full", "too many requests are waiting already"),
    "queue_timeout": (Overloaded, "overloaded", "no place became free in time"),
    "body_bytes": (Overloaded, "overloaded", "the bodies of other requests take all the memory"),
    "tenant_bytes": (
        TooManyRequests,
        "rate_limited",
        "the bodies of your key's other requests take all the memory it may have",
    ),
}
"""What each is answered: the error, its slug, its message."""


@dataclass(slots=True)
class TenantUse:
    """Requests and bytes of one tenant in this process.

    Attributes:
        requests: inside or waiting.
        body_bytes: of their bodies.
    """

    requests: int = 0
    body_bytes: int = 0


class AdmittedRequest:
    """One request: its place and the bytes counted for it, until the context is left.

    Attributes:
        size: bytes that its body, and media that were fetched for it, are counted with.
    """

    __slots__ = ("_admission", "_tenant", "_ticket", "_use", "size")

    def __init__(self, admission: "Admission", tenant: Tenant) -> None:
        self._admission = admission
        self._tenant = tenant
        self._use = admission.use_of(tenant)
        self._ticket: Ticket | None = None
        self.size = 0

    def __enter__(self) -> Self:
        """Begin with nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what it has."""
        self.release()
        if self._ticket is not None:
            self._use.requests -= 1
            self._admission.door.leave(self._ticket)

    def arrive(self) -> Ticket:
        """Return a ticket, which may have to wait its `turn`.

        Raises:
            TooManyRequests: the tenant has too many requests, or the queue is full.
        """
        self._ticket = ticket = self._admission.arrive(self._tenant, self._use)
        return ticket

    @property
    def scope(self) -> str:
        """Name of the tenant."""
        return self._tenant.name

    def beside(self) -> "AdmittedRequest":
        """Return what other bytes of the same tenant are counted with."""
        return AdmittedRequest(self._admission, self._tenant)

    def add(self, size: int) -> None:
        """Count more bytes.

        Raises:
            TryLater: as `grow` does.
        """
        self.grow(self.size + size)

    def grow(self, size: int) -> None:
        """Count at least `size` bytes.

        Raises:
            Overloaded: with those of all others they would be too many.
            TooManyRequests: with the tenant's others they would be.
        """
        if size > self.size:
            self._admission.take_bytes(self._use, size - self.size)
            self.size = size

    def release(self) -> None:
        """Stop counting the body, which is not in memory any more."""
        if self.size:
            self._admission.body_bytes -= self.size
            self._use.body_bytes -= self.size
            self.size = 0


class Admission:
    """The limits of one process, and what is in it. Belongs to one event loop.

    Attributes:
        door: who is inside and who waits.
        body_bytes: of all bodies now.
        refused: how many were sent away, and why.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        """Begin empty; `clock` never goes back."""
        self._limits = limits
        self._clock = clock
        self._pace = _pace(limits)
        self._uses: dict[str, TenantUse] = {}
        self.door = Door(limits.requests, limits.queue)
        self.body_bytes = 0
        self.refused: Counter[Reason] = Counter()

    def adopt(self, limits: Limits) -> None:
        """Have other limits from now on."""
        if limits.tenant_per_minute != self._limits.tenant_per_minute:
            self._pace = _pace(limits)
        self._limits = limits
        self.door.resize(limits.requests, limits.queue)

    def keep_pace(self, tenant: Tenant) -> None:
        """Count a request of this tenant.

        Raises:
            TooManyRequests: it has had its share of this minute.
        """
        wait_s = 0.0 if self._pace is None else self._pace.take(tenant, self._clock())
        if wait_s:
            raise self._refusal("tenant_rate", wait_s)

    def request(self, tenant: Tenant) -> AdmittedRequest:
        """Return the context of a request of this tenant."""
        return AdmittedRequest(self, tenant)

    def use_of(self, tenant: Tenant) -> TenantUse:
        """Return the use of a tenant. One is kept per tenant, so that the keys file bounds them."""
        use = self._uses.get(tenant.name)
        if use is None:
            use = self._uses[tenant.name] = TenantUse()
        return use

    def arrive(self, tenant: Tenant, use: TenantUse) -> Ticket:
        """Count a request that has come, for `AdmittedRequest` alone."""
        most = self._limits.tenant_requests
        if most is not None and use.requests >= most:
            raise self._refusal("tenant_requests")
        try:
            ticket = self.door.arrive(tenant)
        except QueueFull:
            raise self._refusal("queue_full") from None
        use.requests += 1
        return ticket

    async def turn(self, ticket: Ticket) -> None:
        """Wait for a place.

        Raises:
            TooManyRequests: the ticket had to make room in the queue.
            Overloaded: it waited too long.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.queue_timeout_s):
                await ticket.wait()
        if ticket.where != "inside":
            raise self._refusal("queue_timeout" if ticket.where == "queue" else "queue_full")

    def take_bytes(self, use: TenantUse, size: int) -> None:
        """Count more bytes of a tenant's bodies, for `AdmittedRequest` alone.

        Raises:
            Overloaded: they would be too many.
            TooManyRequests: they would be too many of this tenant's.
        """
        most = self._limits.tenant_body_bytes
        if most is not None and use.body_bytes + size > most:
            raise self._refusal("tenant_bytes")
        if self.body_bytes + size > self._limits.body_bytes:
            raise self._refusal("body_bytes")
        self.body_bytes += size
        use.body_bytes += size

    def _refusal(self, reason: Reason, retry_after_s: float = 1.0) -> TryLater:
        self.refused[reason] += 1
        kind, slug, message = REFUSALS[reason]
        return kind(message, slug=slug, retry_after_s=retry_after_s)


def _pace(limits: Limits) -> Pace | None:
    return None if limits.tenant_per_minute is None else Pace(limits.tenant_per_minute)
