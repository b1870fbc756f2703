"""Choice of a request's consumer before its items are encoded."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.request.attempt import Attempt
from epd.request.host_choice import HostChoice
from epd.request.prefill_decode import needs_prefill
from epd.request.prefix import request_prefix
from epd.routing.host_report import Host
from epd.routing.instances import CONSUMERS, Role
from epd.routing.namespaces import Namespaces
from epd.routing.prefix import NO_PREFIX, Prefix
from epd.routing.table import InstanceTable, Reservation


class Target(NamedTuple):
    """Receiver of a request's encoder outputs, as far as it is known before the encode.

    Attributes:
        first: place at the instance that computes the prompt; None if it is chosen later.
        namespace: namespace in which the consumer looks up outputs; None if unknown.
        host: server of the consumer's host, if each host has a memory; None if unknown.
        found: entries that the memory of that host has; None if it was not asked.
    """

    first: Reservation | None = None
    namespace: str | None = None
    host: Host | None = None
    found: Mapping[EntryKey, EntryInfo] | None = None

    @property
    def consumer(self) -> Reservation | None:
        """The place at that instance, if it reads encoder outputs."""
        reads = self.first is not None and self.first.instance.role in CONSUMERS
        return self.first if reads else None


ANY_CONSUMER = Target()


@dataclass(frozen=True, slots=True, eq=False)
class EarlyChoice:
    """Choice of the consumer before the encode, if an output is usable by only one of them.

    This is so if outputs are pushed to it, or if consumers have different namespaces, or memories:
    `_hosts` is None if all have one store.
    """

    _table: InstanceTable
    _namespaces: Namespaces
    _choose_first: Callable[[Attempt, Prefix], Awaitable[Reservation]]
    _pushed: bool
    _by_content: bool
    _hosts: HostChoice | None = None

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
        by_host = attempt.course.encode and self._hosts is not None
        if not ((self._pushed or differ or by_host) and may_consume):
            return Target(namespace=self.shared_namespace)
        prefix = request_prefix(attempt.request) if self._by_content else NO_PREFIX
        found: Mapping[str, Mapping[EntryKey, EntryInfo]] = {}
        if by_host and self._hosts is not None:
            found = await self._hosts.find(attempt)
            attempt = attempt._replace(worth=self._hosts.worth(attempt, found))
        first = await self._choose_first(attempt, prefix)
        if first.instance.role not in CONSUMERS:
            return Target(first, self.shared_namespace)
        host = None if self._hosts is None else self._hosts.host_of(first.instance)
        known = None if host is None else found.get(host.address)
        return Target(first, self._namespaces.namespace_of(first.instance), host, known)
