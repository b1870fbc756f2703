"""Choice of a request's host, if each host of the fleet has a memory of its own.

A consumer reads only what its host's memory has, or can get from the tier behind it. So the
consumer is chosen first, and the encode instances by what that host can read. Of equal consumers,
the best is on the host that has most of the request's entries.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ec_store.entry import EntryInfo
from ec_store.keys import EntryKey
from epd.encoder_cache.hosts import HostStores
from epd.encoder_cache.identity import Identifiers, output_key
from epd.request.attempt import Attempt
from epd.routing.host_report import Host
from epd.routing.hosts import InstanceHosts
from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.table import InstanceTable

Worth = Callable[[Instance], float]

REACHED = 0.5
"""Worth of a host for which missing entries can be encoded; less than any entry's."""


@dataclass(frozen=True, slots=True, eq=False)
class HostChoice:
    """What the hosts of the consumers are worth for a request. Belongs to one event loop."""

    _table: InstanceTable
    _hosts: InstanceHosts
    _stores: HostStores
    _identifiers: Identifiers

    def host_of(self, instance: Instance) -> Host | None:
        return self._hosts.host_of(instance)

    async def find(self, attempt: Attempt) -> dict[str, Mapping[EntryKey, EntryInfo]]:
        """Return the stored entries of a request on each host of a consumer, by address.

        All servers are asked at once. With a single host there is nothing to choose, and it is
        asked later, with its tier.
        """
        keys = {} if attempt.reencode else self._keys(attempt)
        return {} if len(keys) < 2 else await self._stores.find_here(keys)  # noqa: PLR2004

    def worth(
        self, attempt: Attempt, found: Mapping[str, Mapping[EntryKey, EntryInfo]]
    ) -> Worth | None:
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
                worth_here = _worth(found.get(host.address, {}), items, reached=reached)
                by_address[host.address] = worth_here

        def worth(instance: Instance) -> float:
            host = self._hosts.host_of(instance)
            return 0.0 if host is None else by_address.get(host.address, 0.0)

        return worth

    def _hosts_of(self, *roles: Role) -> set[Host | None]:
        """Return the hosts of the usable instances; None stands for those that name none."""
        return {candidate.load.host for candidate in self._table.usable_candidates(*roles)}

    def _consumer_hosts(self) -> dict[Host, set[str]]:
        """Return the hosts of the consumers, with their namespaces."""
        hosts: dict[str, Host] = {}
        namespaces: dict[Host, set[str]] = {}
        for candidate in self._table.usable_candidates(*CONSUMERS):
            host, namespace = candidate.load.host, candidate.load.namespace
            if host is None:
                continue
            # After a restart of its server, instances name its memories at different times.
            host = hosts.setdefault(host.address, host)
            namespaces.setdefault(host, set()).update({namespace} if namespace else ())
        return namespaces

    def _keys(self, attempt: Attempt) -> dict[Host, list[EntryKey]]:
        body = attempt.request.body
        outputs = [output_key(body, item) for item in attempt.request.items]
        known = [self._identifiers.identifier_of(output) for output in outputs if output]
        identifiers = [*dict.fromkeys(identifier for identifier in known if identifier)]
        return {
            host: [
                EntryKey(namespace, identifier)
                for namespace in sorted(namespaces)
                for identifier in identifiers
            ]
            for host, namespaces in self._consumer_hosts().items()
        }


def _worth(entries: Mapping[EntryKey, EntryInfo], items: int, *, reached: bool) -> float:
    """Return the worth of a host with these entries, for a request with a number of items.

    `reached` tells whether an encode instance writes where the host reads.
    """
    # One key may be that of several items: too small a number only doubts a whole host.
    complete = len(entries) >= items
    total = sum(info.size_bytes for info in entries.values())
    return REACHED * reached + (total if complete or reached else 0)
