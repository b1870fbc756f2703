"""Type of the file system that holds a file."""

import os
from collections.abc import Iterable
from pathlib import Path

TABLE = Path("/proc/self/mountinfo")
MEMORY = frozenset({"tmpfs", "ramfs"})


def in_memory(fd: int) -> bool:
    """Return whether an open file or folder is in this machine's memory (tmpfs).

    False if the system has no mount table, as outside Linux.
    """
    try:
        device = os.fstat(fd).st_dev
        table = TABLE.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    return kind_of(device, table) in MEMORY


def kind_of(device: int, table: Iterable[str]) -> str | None:
    """Return the type of the file system on a device; None if the table does not list it.

    Args:
        device: device number, as `os.stat` returns it.
        table: lines of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in table:
        mount, _, system = line.partition(" - ")
        if mount.split(" ")[2:3] == [number]:
            return system.partition(" ")[0]
    return None
