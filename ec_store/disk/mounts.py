"""Types of the file systems on which a store's files are."""

import os
from collections.abc import Iterable
from pathlib import Path

TABLE = Path("/proc/self/mountinfo")
MEMORY = frozenset({"tmpfs", "ramfs"})
LOCAL = MEMORY | {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay"}
"""Types of which all files and locks are this kernel's."""


def file_system_kind(fd: int) -> str | None:
    """Return the type of an open file's system; None without a mount table, as outside Linux."""
    try:
        device = os.fstat(fd).st_dev
        table = TABLE.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    return kind_of(device, table)


def kind_of(device: int, table: Iterable[str]) -> str | None:
    """Return the type of the file system on a device; None if the table does not list it.

    The table has the lines of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in table:
        mount, _, system = line.partition(" - ")
        if mount.split(" ")[2:3] == [number]:
            return system.partition(" ")[0]
    return None
