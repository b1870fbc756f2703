"""The hosts of the instances, as far as their metrics name them. No I/O."""

from epd.routing.host_report import Host
from epd.routing.instances import Instance
from epd.routing.table import InstanceTable


class InstanceHosts:
    """The hosts of the instances of one table. Belongs to one event loop."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table

    def record_host(self, instance: Instance, host: Host | None) -> None:
        """Record the server that an instance names; an instance outside the table is ignored."""
        if (load := self._table.find_load(instance)) is not None:
            load.host = host

    def host_of(self, instance: Instance) -> Host | None:
        load = self._table.find_load(instance)
        return None if load is None else load.host

    def reaches(self, instance: Instance, host: Host | None) -> bool:
        """Return whether the outputs of an instance are known to be readable at a host."""
        own = self.host_of(instance)
        return own is not None and host is not None and own.reaches(host)
