"""Choice of a request's consumer before its items are encoded.

If each host of the fleet has a memory of its own, a consumer reads only what its host's memory has,
or can get from the tier behind it. So the consumer is chosen first, and the encode instances by
what that host can read. Of equal consumers, the best is on the host that has most of the request's
entries.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.encoder_cache.claims import Claims
from epd.encoder_cache.hosts import HostStores
from epd.encoder_cache.identity import Identifiers, output_key
from epd.request.attempt import NO_PROMPT, Attempt, Target
from epd.request.choices import Worth
from epd.request.prefix import request_prefix
from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.reports import Host
from epd.routing.store_access import StoreAccess
from epd.routing.table import InstanceTable, Reservation

REACHED = 0.5
"""Worth of a host for which missing entries can be encoded; less than any entry's."""

EntriesByHost = Mapping[str, Mapping[EntryKey, EntryInfo]]
"""Stored entries of a request, by the address of the host that has them."""


@dataclass(frozen=True, slots=True, eq=False)
class EarlyChoice:
    """Choice of the consumer before the encode, if an output is usable by only one of them.

    This is so if outputs are pushed to it, or if consumers have different namespaces, or memories.
    `_claims` are those in the store of all instances; `_hosts` are the memories of their hosts.
    """

    _table: InstanceTable
    _access: StoreAccess
    _choose_first: Callable[[Attempt, Worth | None], Awaitable[Reservation]]
    _pushed: bool
    _by_content: bool
    _claims: Claims | None
    _hosts: HostStores | None
    _identifiers: Identifiers

    def target(self, first: Reservation | None = None) -> Target:
        """Return the receiver of outputs. Without a consumer, its namespace is that of all."""
        if first is not None and first.instance.role in CONSUMERS:
            namespace = self._access.namespace_of(first.instance)
        else:
            namespaces = self._access.of_consumers()
            namespace = next(iter(namespaces)) if len(namespaces) == 1 else None
        shares = partial(self._access.shares_namespace, namespace=namespace)
        fits = None if namespace is None else shares
        return Target(first, self._pushed, namespace, None, fits, self._claims)

    async def choose_target(self, attempt: Attempt) -> Target:
        """Return the receiver of the request's outputs, chosen now if it must be.

        Raises:
            ProxyError: no instance is available, or the choice failed.
        """
        encodes = attempt.course.encode
        hosts = self._hosts if encodes else None
        differ = encodes and len(self._access.of_consumers()) > 1
        may_consume = attempt.needs_prefill or self._table.has(Role.PREFILL_DECODE)
        if not ((self._pushed or differ or hosts is not None) and may_consume):
            return self.target()
        if self._by_content:
            prompt = NO_PROMPT._replace(prefix=request_prefix(attempt.request))
            attempt = attempt._replace(prompt=prompt)
        if hosts is None:
            return self.target(await self._choose_first(attempt, None))
        # With a single host there is nothing to choose: it is asked later, with its tier.
        keys = {} if attempt.reencode else self._keys(attempt)
        by_host = await hosts.find_here(keys) if len(keys) > 1 else {}
        target = self.target(await self._choose_first(attempt, self.worth(attempt, by_host)))
        if target.consumer is None:
            return target
        host = self._access.host_of(target.consumer.instance)
        fits = partial(self._access.reaches, namespace=target.namespace, host=host)
        claims = hosts.claims_at(host)
        entries = None if host is None else by_host.get(host.address)
        return target._replace(host=host, fits=fits, claims=claims, host_entries=entries)

    def worth(self, attempt: Attempt, by_host: EntriesByHost) -> Worth | None:
        """Return the worth of a consumer: the bytes of the entries that its host has.

        They are worth nothing where the other items cannot be encoded: the consumer then gets all
        media of the request. None: all consumers are on the same host.
        """
        consumers = self._hosts_of(*CONSUMERS)
        if len({host and host.address for host in consumers}) < 2:  # noqa: PLR2004
            return None
        encoders, items = self._hosts_of(Role.ENCODE), len(attempt.request.items)
        by_address: dict[str, float] = {}
        for host in consumers:
            if host is not None:
                reached = any(each is not None and each.reaches(host) for each in encoders)
                entries = by_host.get(host.address, {})
                # One key may be that of several items: too small a number only doubts a whole host.
                counts = reached or len(entries) >= items
                total = sum(info.size_bytes for info in entries.values()) if counts else 0
                by_address[host.address] = REACHED * reached + total

        def worth(instance: Instance) -> float:
            host = self._access.host_of(instance)
            return 0.0 if host is None else by_address.get(host.address, 0.0)

        return worth

    def _hosts_of(self, *roles: Role) -> set[Host | None]:
        """Return the hosts of the usable instances; None stands for those that name none."""
        return {candidate.load.host for candidate in self._table.usable_candidates(*roles)}

    def _keys(self, attempt: Attempt) -> dict[Host, list[EntryKey]]:
        """Return the keys of a request's entries on the host of each consumer."""
        body = attempt.request.body
        outputs = [output_key(body, item) for item in attempt.request.items]
        names = [self._identifiers.identifier_of(output) for output in outputs if output]
        identifiers = [*dict.fromkeys(filter(None, names))]
        hosts: dict[str, Host] = {}
        namespaces: dict[Host, set[str]] = {}
        for candidate in self._table.usable_candidates(*CONSUMERS):
            if (host := candidate.load.host) is None:
                continue
            # After a restart of its server, instances name its memories at different times.
            host = hosts.setdefault(host.address, host)
            namespace = candidate.load.namespace
            namespaces.setdefault(host, set()).update({namespace} if namespace else ())
        return {
            host: [EntryKey(name, each) for name in sorted(names) for each in identifiers]
            for host, names in namespaces.items()
        }
