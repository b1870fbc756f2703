"""How each instance uses the store: its namespace, and whether it writes. No I/O.

Instances with different encoder weights have different namespaces and share no outputs. This is the
case during a rolling update. An instance with an unknown namespace is assumed to share with all
others.

A consumer that encodes media itself writes the outputs to the store only with the role `ec_both`.
"""

from epd.routing.instances import CONSUMERS, Instance
from epd.routing.table import InstanceTable


class Namespaces:
    """The namespaces of the instances of one table. Belongs to one event loop."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table
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

    def writes_to(self, instance: Instance, namespace: str | None) -> bool:
        """Return whether an instance writes what it encodes, as far as known to a namespace."""
        load = self._table.find_load(instance)
        writes = load is not None and bool(load.writes_outputs)
        return writes and self.shares_namespace(instance, namespace)

    def namespace_of(self, instance: Instance) -> str | None:
        load = self._table.find_load(instance)
        return load.namespace or None if load is not None else None

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
