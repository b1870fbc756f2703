"""Memory that this process can take before the kernel ends a process for it."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SPARE_BYTES = 64 * 2**20
"""Bytes that must stay: page tables of the new memory, and other allocations meanwhile."""


class _Limits(NamedTuple):
    """Files of the memory controller of one version of control groups.

    Attributes:
        folder: mount of the controller.
        limit, used: files with the limit and with the used bytes.
        cache: prefix of the fields of `memory.stat` that count page cache, which the kernel frees.
    """

    folder: str
    limit: str
    used: str
    cache: str


_FIRST = _Limits("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_SECOND = _Limits("sys/fs/cgroup", "memory.max", "memory.current", "")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that the machine, and each control group of this process, have left.

    Return None if the kernel reports neither. `root` is the folder of `proc` and `sys`.
    """
    return min([*_of_machine(root), *_of_groups(root)], default=None)


def check_room(size_bytes: int) -> None:
    """Raise OSError if so much memory would end this process, or another one."""
    left = available_bytes()
    if left is not None and left < size_bytes + SPARE_BYTES:
        text = (
            f"it needs {size_bytes} bytes, and {left} are left on the machine or within the memory "
            f"limit of the container, of which {SPARE_BYTES} must stay"
        )
        raise OSError(errno.ENOMEM, text)


def _of_machine(root: Path) -> Iterator[int]:
    for name, size in _fields(root / "proc/meminfo"):
        if name == "MemAvailable:":
            yield size * 1024


def _of_groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version = _SECOND
        elif "memory" in controllers.split(","):
            version = _FIRST
        else:
            continue
        mount = root / version.folder
        group = mount / path.lstrip("/")
        # The limits of all groups above apply too. In a container the path may be the host's, which
        # is not there, and the container's own group is the mount.
        for folder in (group, *group.parents):
            yield from _of_group(folder, version)
            if folder == mount:
                break


def _of_group(folder: Path, version: _Limits) -> Iterator[int]:
    limit = [int(line) for line in _lines(folder / version.limit) if line.isdigit()]
    used = [int(line) for line in _lines(folder / version.used) if line.isdigit()]
    if limit and used:
        caches = {f"{version.cache}active_file", f"{version.cache}inactive_file"}
        freed = sum(size for name, size in _fields(folder / "memory.stat") if name in caches)
        yield max(0, limit[0] - used[0] + freed)


def _fields(path: Path) -> Iterator[tuple[str, int]]:
    for line in _lines(path):
        name, size, *_ = *line.split(), "", ""
        if size.isdigit():
            yield name, int(size)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
