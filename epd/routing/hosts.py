"""The hosts of the instances, as far as their metrics name them. No I/O."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from epd.routing.host_report import Host
from epd.routing.instances import Instance, Role
from epd.routing.table import InstanceTable


class InstanceHosts:
    """The hosts of the instances of one table. Belongs to one event loop."""

    def __init__(
        self, table: InstanceTable, on_change: Callable[[AbstractSet[str]], None] | None = None
    ) -> None:
        """Create it. `on_change` gets the addresses of all servers when an instance changes its."""
        self._table = table
        self._on_change = on_change

    def record_host(self, instance: Instance, host: Host | None) -> None:
        """Record the server that an instance names; an instance outside the table is ignored."""
        load = self._table.find_load(instance)
        if load is None or load.host == host:
            return
        load.host = host
        self.use_servers()

    def use_servers(self) -> None:
        """Tell the addresses of all servers: an instance has changed its server, or has left."""
        if self._on_change is not None:
            hosts = (candidate.load.host for candidate in self._table.all(*Role))
            self._on_change({host.address for host in hosts if host is not None})

    def host_of(self, instance: Instance) -> Host | None:
        load = self._table.find_load(instance)
        return None if load is None else load.host

    def reaches(self, instance: Instance, host: Host | None) -> bool:
        """Return whether the outputs of an instance are known to be readable at a host."""
        own = self.host_of(instance)
        return own is not None and host is not None and own.reaches(host)
