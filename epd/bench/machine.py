"""The machine that figures come from."""

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def machine() -> dict[str, str | int]:
    """Its processor, how many cores this process may use, its kernel and Python."""
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
