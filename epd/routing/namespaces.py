"""How each instance uses the store: its namespace, and whether it writes. No I/O.

Instances with different encoder weights have different namespaces and share no outputs. This is the
case during a rolling update. An instance with an unknown namespace is assumed to share with all
others.

A consumer that encodes media itself writes the outputs to the store only with the role `ec_both`.
"""

import math
import time
from collections.abc import Callable

from epd.routing.health import HealthState
from epd.routing.instances import CONSUMERS, Instance, Role
from epd.routing.table import InstanceTable

INTERVAL_S = 5.0
"""Interval of questions to an instance. One that was down is asked as soon as it is up again."""


class Namespaces:
    """The namespaces of the instances of one table. Belongs to one event loop."""

    def __init__(self, table: InstanceTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock
        self._known: dict[tuple[Role, str], str] = {}
        self._writers: set[tuple[Role, str]] = set()
        self._asked_s: dict[tuple[Role, str], float] = {}
        self._consumers: frozenset[str] | None = None
        self._counted_at = table.changes

    def due_instances(self) -> list[Instance]:
        """Return the instances to ask now; each answer goes to `record_namespace`."""
        members = {instance.key: instance for instance in self._table.of_roles(*Role)}
        up = {
            key: instance
            for key, instance in members.items()
            if self._table.state(instance) is not HealthState.DOWN
        }
        self._known = {key: name for key, name in self._known.items() if key in members}
        self._writers &= members.keys()
        self._asked_s = {key: asked_s for key, asked_s in self._asked_s.items() if key in up}
        now_s = self._clock()
        due = [
            instance
            for key, instance in up.items()
            if self._asked_s.get(key, -math.inf) + INTERVAL_S <= now_s
        ]
        self._asked_s.update((instance.key, now_s) for instance in due)
        return due

    def record_namespace(self, instance: Instance, namespace: str | None) -> None:
        """Record the namespace of an instance; empty for none or several, None without an answer.

        An instance that is not in the table is dropped by the next `due_instances`.
        """
        if namespace is None or namespace == self._known.get(instance.key, ""):
            return
        self._consumers = None
        if namespace:
            self._known[instance.key] = namespace
        else:
            del self._known[instance.key]

    def record_writes(self, instance: Instance, *, writes: bool) -> None:
        if writes:
            self._writers.add(instance.key)
        else:
            self._writers.discard(instance.key)

    def consumers_write(self) -> bool:
        """Return whether all consumers are known to write the outputs of their own encodes."""
        consumers = self._table.of_roles(*CONSUMERS)
        return bool(consumers) and all(consumer.key in self._writers for consumer in consumers)

    def namespace_of(self, instance: Instance) -> str | None:
        return self._known.get(instance.key)

    def of_consumers(self) -> frozenset[str]:
        """Return all known namespaces of consumers, collected again only after a change."""
        if self._consumers is None or self._counted_at != self._table.changes:
            known = (self.namespace_of(instance) for instance in self._table.of_roles(*CONSUMERS))
            self._consumers = frozenset(namespace for namespace in known if namespace is not None)
            self._counted_at = self._table.changes
        return self._consumers

    def shares_namespace(self, instance: Instance, namespace: str | None) -> bool:
        """Return whether the outputs of an instance are usable in a namespace, as far as known."""
        return namespace is None or self.namespace_of(instance) in {None, namespace}
