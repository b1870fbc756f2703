"""Where the encoder cache of a fleet is that was given none."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ec_store import EntryKey, open_store

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it is checked to be this user's
LEAST_BYTES = 2 * 2**30
MOST_BYTES = 64 * 2**30


class FolderTaken(Exception):
    """The folder is another user's, or another fleet's."""


def default_folder(port: int, logs: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """A folder in shared memory where that has room, else beside the logs; it is not made.

    A run after one that was killed takes over what that left in shared memory.
    """
    if shared_memory.is_dir() and _quota_bytes(shared_memory) >= LEAST_BYTES:
        return shared_memory / f"epd-up-{os.getuid()}-{port}"
    return logs.absolute() / "ec-store"


def default_url(folder: Path) -> str:
    """The store in a folder, with a quota of half of what is free there, 64 GiB at most."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return f"{folder.as_uri()}?max_bytes={min(MOST_BYTES, _quota_bytes(there))}"


def _quota_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free // 2


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """The folder, for this process alone; it is deleted when the context is left.

    Raises:
        FolderTaken: it is another's, and stays.
    """
    make(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    # Two that start at the same moment both find their ports free. The lock ends with its process.
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FolderTaken(f"{folder} is another fleet's: is one starting on this port?") from None


def make(folder: Path) -> None:
    """Make it, where it is not there from an earlier run.

    Raises:
        FolderTaken: another user made it, or it is a link.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or folder.is_symlink():
        raise FolderTaken(f"{folder} is not this user's: name another with --ec-store")


def check_reachable(url: str) -> None:
    """Ask the store for an entry.

    Raises:
        StoreUnavailable: it gives no answer.
    """
    with open_store(url) as store:
        store.lookup([EntryKey("", "health")])
