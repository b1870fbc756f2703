"""Types of the file systems on which a store's files are."""

import os
from collections.abc import Iterable
from pathlib import Path

TABLE = Path("/proc/self/mountinfo")
MEMORY = frozenset({"tmpfs", "ramfs"})
LOCAL = MEMORY | {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay"}
"""Types on which this kernel grants and releases file locks by itself, without a server."""


def in_memory(fd: int) -> bool:
    """Return whether an open file or folder is in this machine's memory (tmpfs)."""
    return _kind(fd) in MEMORY


def is_local(fd: int) -> bool:
    """Return whether an open file or folder is known to be on a file system of this machine."""
    return _kind(fd) in LOCAL


def _kind(fd: int) -> str | None:
    """Return the type of a file's system; None without a mount table, as outside Linux."""
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
