"""Admission control: admit a request, queue it, or reject it before its body is read.

Bytes of bodies, and requests of each tenant, have limits too.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

from epd.config.sections import ConfigFields
from epd.edge.fair_queue import FairQueue, Ticket
from epd.edge.tenant_use import RateLimiter, TenantUse
from epd.errors import Overloaded, RequestRefused, TooManyRequests, TryLater
from epd.media.memory_count import MemoryCount
from epd.tenants import Tenant

Reason = Literal[
    "tenant_rate", "tenant_requests", "queue_full", "queue_timeout", "body_bytes", "tenant_bytes"
]

RATE_LIMITED = (TooManyRequests, "rate_limited")

REFUSALS: Mapping[Reason, tuple[type[TryLater], str, str]] = {
    "tenant_rate": (*RATE_LIMITED, "your key has reached its limit of requests per minute"),
    "tenant_requests": (*RATE_LIMITED, "your key has reached its limit of concurrent requests"),
    "queue_full": (TooManyRequests, "queue_full", "the queue of waiting requests is full"),
    "queue_timeout": (Overloaded, "overloaded", "the request waited too long in the queue"),
    "body_bytes": (Overloaded, "overloaded", "the bodies of other requests use all the memory"),
    "tenant_bytes": (
        *RATE_LIMITED,
        "the bodies of your key's other requests use all of its memory",
    ),
}
"""Error, slug and message of the response for each reason of a rejection."""


@dataclass(slots=True, eq=False)
class AdmittedRequest(MemoryCount):
    """Slot and bytes of one request. The end of the context releases both.

    Attributes:
        size: bytes counted for the request: its body, and the media fetched for it.
    """

    _admission: "Admission"
    _tenant: Tenant
    _use: TenantUse
    _ticket: Ticket | None = None
    size: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        if self._ticket is not None:
            if self._admission.config.tenant_max_requests is not None:
                self._use.end_request()
            self._admission.queue.leave_queue(self._ticket)

    def enter_queue(self) -> Ticket:
        """Return a ticket, which may have to wait for a slot (`wait_slot`).

        Raises:
            TooManyRequests: the tenant has too many requests, or the queue is full.
        """
        admission, use = self._admission, self._use
        most, has_room = admission.config.tenant_max_requests, True
        if most is not None:
            use.begin_request()  # counted before the others' are read: see `TenantLedger`
            has_room = use.total_requests() <= most
        self._ticket = admission.queue.enter_queue(self._tenant) if has_room else None
        if self._ticket is None:
            if most is not None:
                use.end_request()
            raise admission.refusal("queue_full" if has_room else "tenant_requests")
        return self._ticket

    @property
    def scope(self) -> str:
        return self._tenant.name

    def separate_count(self) -> "AdmittedRequest":
        return AdmittedRequest(self._admission, self._tenant, self._use)

    def add(self, size: int) -> None:
        self.grow(self.size + size)

    def try_add(self, size: int) -> bool:
        if self._admission.exceeded(self._use, size) is not None:
            return False
        self.set_size(self.size + size)
        return True

    def grow(self, size: int) -> None:
        """Count at least `size` bytes.

        Raises:
            Overloaded: the bytes of all requests would exceed the limit.
            TooManyRequests: the bytes of the tenant's requests would exceed its limit.
        """
        more = size - self.size
        if more > 0:
            self.check_room(more)
            self.set_size(size)

    def receive(self, size: int) -> None:
        """Count the `size` bytes of its body that have arrived, or are about to.

        Raises:
            RequestRefused: the body is too large (413).
            TryLater: there is no room for it, as in `grow`.
        """
        self.check_size(size)
        self.grow(size)

    def check_size(self, size: int) -> None:
        """Raise `RequestRefused` (413) if a body of `size` bytes is too large."""
        limit = self._admission.max_body_bytes
        if size > limit:
            raise RequestRefused(
                413, f"the body is larger than {limit} bytes", slug="body_too_large"
            )

    def check_room(self, size: int) -> None:
        """Raise as `grow` does if there is no room for a body of this size. Nothing is counted."""
        if (reason := self._admission.exceeded(self._use, size)) is not None:
            raise self._admission.refusal(reason)

    def remove(self, size: int) -> None:
        self.set_size(max(0, self.size - size))

    def set_size(self, size: int) -> None:
        """Count `size` bytes, which are in memory already, instead of those counted before."""
        added = size - self.size
        self._admission.body_bytes += added
        self._use.body_bytes += added
        self.size = size

    def release(self) -> None:
        """Stop counting the bytes: the body is no longer in memory."""
        if self.size:
            self.set_size(0)


class Admission:
    """Admission control of one process: its limits and its current use. Bound to one event loop.

    Attributes:
        config: limits of all workers together.
        queue: admitted and queued requests.
        max_body_bytes: maximum size of a body.
        body_bytes: bytes of all bodies in memory.
        refused: number of rejected requests, by reason.
    """

    def __init__(
        self,
        config: ConfigFields,
        clock: Callable[[], float],
        new_use: Callable[[str], TenantUse] = lambda _: TenantUse(),
    ) -> None:
        """Start without requests.

        Args:
            config: limits of all workers together.
            clock: monotonic clock, in seconds.
            new_use: returns the use of a tenant, by its name; several workers share it.
        """
        self._clock = clock
        self._uses: dict[str, TenantUse] = {}
        self._new_use = new_use
        self.body_bytes = 0
        self.refused: Counter[Reason] = Counter()
        # The process gets its share of slots and bytes, and the limits of tenants. The workers
        # together keep the configured limits, for any distribution of the requests: they share the
        # requests and the rates of tenants (`TenantLedger`).
        self.config = config
        share = config.workers
        self.queue = FairQueue(max(1, config.max_requests // share), config.max_queue // share)
        self._max_bytes = max(1, config.max_inflight_bytes // share)
        # A tenant gets half: its bodies alone cannot lock out the other tenants. One body of the
        # largest size always fits.
        self.max_body_bytes = config.worker_max_body_bytes
        self._tenant_max_bytes = max(self._max_bytes // 2, self.max_body_bytes)
        per_minute = config.tenant_requests_per_minute
        # A bucket keeps the time at which it will be full: it is in `TenantUse`.
        self._rate = None if per_minute is None else RateLimiter(per_minute)

    def keep_pace(self, tenant: Tenant) -> None:
        """Count a request for the tenant's rate limit.

        Raises:
            TooManyRequests: the tenant has reached its requests per minute.
        """
        if self._rate is None:
            return
        if wait_s := self._rate.take_token(self.use_of(tenant), self._clock()):
            raise self.refusal("tenant_rate", wait_s)

    def request(self, tenant: Tenant) -> AdmittedRequest:
        return AdmittedRequest(self, tenant, self.use_of(tenant))

    def use_of(self, tenant: Tenant) -> TenantUse:
        """Return the use of a tenant. One object is kept per tenant: the keys file bounds them."""
        if (use := self._uses.get(tenant.name)) is None:
            use = self._uses[tenant.name] = self._new_use(tenant.name)
        return use

    async def wait_slot(self, ticket: Ticket) -> None:
        """Wait until the ticket has a slot.

        Raises:
            TooManyRequests: the request was removed from the full queue for another tenant's.
            Overloaded: the request waited longer than `queue_timeout_s`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.queue_timeout_s):
                await ticket.wait()
        if ticket.state != "running":
            raise self.refusal("queue_timeout" if ticket.state == "queued" else "queue_full")

    def exceeded(self, use: TenantUse, size: int) -> Reason | None:
        """Return the limit that more bytes of a tenant would exceed; None if there is room."""
        has_tenants = self.config.api_keys_file is not None
        if has_tenants and use.body_bytes + size > self._tenant_max_bytes:
            return "tenant_bytes"
        return "body_bytes" if self.body_bytes + size > self._max_bytes else None

    def refusal(self, reason: Reason, retry_after_s: float = 1.0) -> TryLater:
        """Count a rejection, and return its error."""
        self.refused[reason] += 1
        kind, slug, message = REFUSALS[reason]
        return kind(message, slug=slug, retry_after_s=retry_after_s)
