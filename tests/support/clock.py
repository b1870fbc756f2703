"""Clock that the test sets, and an instance table with one."""

from epd.routing.instances import Instance
from epd.routing.table import InstanceTable


class Clock:
    """Clock that the test sets."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def table_of(*instances: Instance) -> tuple[InstanceTable, Clock]:
    clock = Clock()
    return InstanceTable(instances, clock=clock), clock
