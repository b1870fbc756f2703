"""How each instance uses the store: its namespace, its host's server, whether it writes. No I/O.

Instances with different encoder weights have different namespaces and share no outputs. This is the
case during a rolling update. An instance with an unknown namespace is assumed to share with all
others.

If each host has a memory, an instance uses the server of its host. One without a known server
shares with no other.

A consumer that encodes media itself writes the outputs to the store only with the role `ec_both`.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.reports import Host
from epd.routing.table import InstanceTable


class StoreAccess:
    """How the instances of one table use the store. Belongs to one event loop."""

    def __init__(
        self,
        table: InstanceTable,
        on_servers: Callable[[AbstractSet[str]], None] = lambda _: None,
    ) -> None:
        """Create it. `on_servers` gets the addresses of all servers when one of them changes."""
        self._table = table
        self._on_servers = on_servers
        self._consumers: frozenset[str] | None = None
        self._counted_at = table.changes

    def record_namespace(self, instance: Instance, namespace: str | None) -> None:
        """Record the namespace of an instance; empty for none or several, None without an answer.

        An instance that is not in the table is ignored.
        """
        load = self._table.find_load(instance)
        if load is not None and namespace not in {None, load.namespace}:
            load.namespace = namespace
            self._consumers = None

    def record_writes(self, instance: Instance, *, writes: bool) -> None:
        if (load := self._table.find_load(instance)) is not None:
            load.writes_outputs = writes

    def record_host(self, instance: Instance, host: Host | None) -> None:
        """Record the server that an instance names; an instance outside the table is ignored."""
        load = self._table.find_load(instance)
        if load is not None and load.host != host:
            load.host = host
            self.use_servers()

    def use_servers(self) -> None:
        """Tell the addresses of all servers: an instance has changed its server, or has left."""
        hosts = (candidate.load.host for candidate in self._table.all(*Role))
        self._on_servers({host.address for host in hosts if host is not None})

    def consumers_write(self) -> bool:
        """Return whether all consumers are known to write the outputs of their own encodes."""
        consumers = self._table.all(*CONSUMERS)
        return bool(consumers) and all(consumer.load.writes_outputs for consumer in consumers)

    def consumers_share(self) -> bool:
        """Return whether consumers write their outputs, as far as it is known of each."""
        known = {consumer.load.writes_outputs for consumer in self._table.all(*CONSUMERS)}
        return True in known and False not in known

    def any_consumer_writes(self) -> bool:
        return any(consumer.load.writes_outputs for consumer in self._table.all(*CONSUMERS))

    def writes(self, instance: Instance) -> bool:
        """Return whether an instance is known to write what it encodes."""
        load = self._table.find_load(instance)
        return load is not None and bool(load.writes_outputs)

    def namespace_of(self, instance: Instance) -> str | None:
        load = self._table.find_load(instance)
        return load.namespace or None if load is not None else None

    def host_of(self, instance: Instance) -> Host | None:
        load = self._table.find_load(instance)
        return None if load is None else load.host

    def is_at(self, instance: Instance, host: Host) -> bool:
        """Return whether an instance is on a host: a consumer there needs no tier."""
        own = self.host_of(instance)
        return own is not None and own.address == host.address

    def of_consumers(self) -> frozenset[str]:
        """Return all known namespaces of consumers, collected again only after a change."""
        if self._consumers is None or self._counted_at != self._table.changes:
            known = (consumer.load.namespace for consumer in self._table.all(*CONSUMERS))
            self._consumers = frozenset(filter(None, known))
            self._counted_at = self._table.changes
        return self._consumers

    def shares_namespace(self, instance: Instance, namespace: str | None) -> bool:
        """Return whether the outputs of an instance are usable in a namespace, as far as known."""
        return namespace is None or self.namespace_of(instance) in {None, namespace}

    def reaches(self, instance: Instance, namespace: str | None, host: Host | None) -> bool:
        """Return whether the outputs of an instance are readable in a namespace at a host.

        An instance or a consumer without a known server is out of reach: the consumer would wait
        for an entry that does not come.
        """
        own = self.host_of(instance)
        if own is None or host is None or not own.reaches(host):
            return False
        return self.shares_namespace(instance, namespace)
