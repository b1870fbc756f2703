"""Choice of a request's consumer before its items are encoded."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from epd.request.attempt import Attempt
from epd.request.prefill_decode import needs_prefill
from epd.request.prefix import request_prefix
from epd.routing.instances import CONSUMERS, Role
from epd.routing.namespaces import Namespaces
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.table import InstanceTable, Reservation


class Target(NamedTuple):
    """Receiver of a request's encoder outputs, as far as it is known before the encode.

    Attributes:
        first: place at the instance that computes the prompt; None if it is chosen later.
        namespace: namespace in which the consumer looks up outputs; None if unknown.
    """

    first: Reservation | None = None
    namespace: str | None = None

    @property
    def consumer(self) -> Reservation | None:
        """The place at that instance, if it reads encoder outputs."""
        reads = self.first is not None and self.first.instance.role in CONSUMERS
        return self.first if reads else None


ANY_CONSUMER = Target()


@dataclass(frozen=True, slots=True, eq=False)
class EarlyChoice:
    """Choice of the consumer before the encode, if an output is usable by only one of them.

    This is so if outputs are pushed to it, or if consumers have different namespaces.
    """

    _table: InstanceTable
    _namespaces: Namespaces
    _choose_first: Callable[[Attempt, Prefix], Awaitable[Reservation]]
    _pushed: bool
    _by_content: bool

    @property
    def shared_namespace(self) -> str | None:
        """The namespace of all consumers; None if it is unknown, or if they have several."""
        known = self._namespaces.of_consumers()
        return next(iter(known)) if len(known) == 1 else None

    async def choose_target(self, attempt: Attempt) -> Target:
        """Return the receiver of the request's outputs, chosen now if it must be.

        Raises:
            ProxyError: no instance is available, or the choice failed.
        """
        differ = attempt.course.encode and len(self._namespaces.of_consumers()) > 1
        may_consume = needs_prefill(attempt) or self._table.has(Role.PREFILL_DECODE)
        if not ((self._pushed or differ) and may_consume):
            return Target(namespace=self.shared_namespace)
        prefix = request_prefix(attempt.request) if self._by_content else NO_PREFIX
        first = await self._choose_first(attempt, prefix)
        if first.instance.role in CONSUMERS:
            return Target(first, self._namespaces.namespace_of(first.instance))
        return Target(first, self.shared_namespace)
