"""CPU time of this machine that other programs used, which falsifies a comparison."""

from contextlib import suppress
from typing import NamedTuple, Self

import psutil


class CpuTime(NamedTuple):
    """CPU time so far, in seconds.

    Attributes:
        machine: of all programs, and what a hypervisor withheld.
        own: of this process and its children.
    """

    machine: float
    own: float

    @classmethod
    def now(cls) -> Self:
        total = psutil.cpu_times()
        used = total.user + total.nice + total.system + total.irq + total.softirq + total.steal
        own = 0.0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                own += times.user + times.system
        return cls(used, own)

    def others_share(self, before: Self, seconds: float) -> float:
        """Return the share of the machine's cores that others used since `before`."""
        others_s = (self.machine - before.machine) - (self.own - before.own)
        return max(0.0, others_s) / (seconds * (psutil.cpu_count() or 1))
