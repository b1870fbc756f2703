"""Description of the machine of a measurement."""

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def machine() -> dict[str, str | int]:
    """Return the processor, the cores of this process, the kernel and the Python version."""
    models = [
        line.partition(":")[2].strip()
        for line in CPUINFO.read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
