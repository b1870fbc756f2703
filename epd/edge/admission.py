"""Who comes in, who waits, and who is sent away, all before a body is read."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

from epd.config import ProxyConfig
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

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process lets in.

    Attributes:
        requests: so many at once.
        queue: so many wait for a place.
        queue_timeout_s: so long.
        body_bytes: so many bytes of bodies at once.
        tenant_requests: so many of a tenant at once, those that wait included.
        tenant_per_minute: so many of a tenant in a minute.
        tenant_body_bytes: so many bytes of a tenant's bodies at once.
    """

    requests: int
    queue: int
    queue_timeout_s: float
    body_bytes: int
    tenant_requests: int | None = None
    tenant_per_minute: float | None = None
    tenant_body_bytes: int | None = None


def limits_of(config: ProxyConfig) -> Limits:
    """Each worker's share: together they keep to what is configured, whoever gets which request."""
    share, most, pace = (
        config.workers,
        config.tenant_max_requests,
        config.tenant_requests_per_minute,
    )
    body_bytes = max(1, config.max_inflight_bytes // share)
    # Half, or what is announced and never sent could shut all others out; but one body always fits.
    tenants = max(body_bytes // 2, max_body_bytes(config))
    return Limits(
        requests=max(1, config.max_requests // share),
        queue=config.max_queue // share,
        queue_timeout_s=config.queue_timeout_s,
        body_bytes=body_bytes,
        tenant_requests=None if most is None else max(1, most // share),
        tenant_per_minute=None if pace is None else pace / share,
        tenant_body_bytes=None if config.api_keys_file is None else tenants,
    )


def max_body_bytes(config: ProxyConfig) -> int:
    """The largest body that one process takes."""
    return min(config.max_body_bytes, max(1, config.max_inflight_bytes // config.workers))


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
        ticket = Ticket(tenant)
        if self.inside < self._places:  # nobody waits then
            self._enter(ticket)
            return ticket
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


class Pace:
    """So many requests of each tenant in a minute: a bucket of tokens that fills steadily.

    The bucket holds a minute's worth, so that nobody is refused who keeps to the limit in every
    minute, however unevenly within it; after a rest there may be two minutes' worth in one.
    """

    def __init__(self, per_minute: float) -> None:
        self._full = max(1.0, per_minute)
        self._per_s = per_minute / MINUTE_S
        self._buckets: dict[Tenant, tuple[float, float]] = {}
        """Tokens, and when they were counted. Tenants are those of the keys file: it is bounded."""

    def take(self, tenant: Tenant, now_s: float) -> float:
        """Seconds until the tenant may come; 0 when it may now, which is then counted."""
        tokens, counted_s = self._buckets.get(tenant, (self._full, now_s))
        tokens = min(self._full, tokens + (now_s - counted_s) * self._per_s)
        admitted = tokens >= 1
        self._buckets[tenant] = (tokens - admitted, now_s)
        return 0.0 if admitted else (1 - tokens) / self._per_s


class Held:
    """The bytes that one request's body is counted with."""

    __slots__ = ("_admission", "size", "tenant")

    def __init__(self, admission: "Admission", tenant: Tenant) -> None:
        self._admission = admission
        self.tenant = tenant
        self.size = 0

    def __enter__(self) -> Self:
        """None yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """None any more."""
        if self.size:
            self._admission.give_bytes(self.tenant, self.size)

    def grow(self, size: int) -> None:
        """Count at least `size` bytes.

        Raises:
            Overloaded: with those of all others they would be too many.
            TooManyRequests: with the tenant's others they would be.
        """
        if size > self.size:
            self._admission.take_bytes(self.tenant, size - self.size)
            self.size = size


class Presence:
    """A request of a tenant that is here: inside or waiting."""

    __slots__ = ("_admission", "_tenant", "_ticket")

    def __init__(self, admission: "Admission", tenant: Tenant) -> None:
        self._admission = admission
        self._tenant = tenant

    def __enter__(self) -> Ticket:
        """It has come; see `Admission.arrive`."""
        self._ticket = self._admission.enter(self._tenant)
        return self._ticket

    def __exit__(self, *_: object) -> None:
        """It leaves."""
        self._admission.leave(self._ticket)


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
        self._present = Counter[Tenant]()
        self._tenant_bytes = Counter[Tenant]()
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

    def arrive(self, tenant: Tenant) -> "Presence":
        """A ticket while the context lasts, which may have to wait its `turn`.

        Raises:
            TooManyRequests: the tenant has too many, or the queue is full.
        """
        return Presence(self, tenant)

    def enter(self, tenant: Tenant) -> Ticket:
        """Count a request that has come, for `Presence` alone; see `arrive`."""
        most = self._limits.tenant_requests
        if most is not None and self._present[tenant] >= most:
            raise self._refusal("tenant_requests")
        try:
            ticket = self.door.arrive(tenant)
        except QueueFull:
            raise self._refusal("queue_full") from None
        self._present[tenant] += 1
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give back what it has, for `Presence` alone."""
        self._present[ticket.tenant] -= 1
        self.door.leave(ticket)

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

    def body(self, tenant: Tenant) -> Held:
        """What a body is counted with, while the context lasts."""
        return Held(self, tenant)

    def take_bytes(self, tenant: Tenant, size: int) -> None:
        """Count more bytes, for `Held` alone.

        Raises:
            Overloaded: they would be too many.
            TooManyRequests: they would be too many of this tenant's.
        """
        most = self._limits.tenant_body_bytes
        if most is not None and self._tenant_bytes[tenant] + size > most:
            raise self._refusal("tenant_bytes")
        if self.body_bytes + size > self._limits.body_bytes:
            raise self._refusal("body_bytes")
        self.body_bytes += size
        self._tenant_bytes[tenant] += size

    def give_bytes(self, tenant: Tenant, size: int) -> None:
        """Count fewer, for `Held` alone."""
        self.body_bytes -= size
        self._tenant_bytes[tenant] -= size

    def _refusal(self, reason: Reason, retry_after_s: float = 1.0) -> TryLater:
        self.refused[reason] += 1
        kind, slug, message = REFUSALS[reason]
        return kind(message, slug=slug, retry_after_s=retry_after_s)


def _pace(limits: Limits) -> Pace | None:
    return None if limits.tenant_per_minute is None else Pace(limits.tenant_per_minute)
