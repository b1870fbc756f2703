"""Where the encoder cache of a fleet is that was given none."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ec_store.keys import EntryKey
from ec_store.opening import open_store

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it is checked to be this user's
OWN = re.compile(r"epd-up-[0-9]+-[0-9]{1,5}")
"""The name of a fleet's folder in shared memory: its user's number, its port."""
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
    handle = _lock_made(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_abandoned(kept_folder: Path, shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's folders in shared memory whose fleet is gone, and return them.

    A fleet locks its folder, and the kernel releases the lock when the fleet's process ends. So a
    folder that can be locked has no owner. A process id would not tell: it may be another process's
    by now.

    Args:
        kept_folder: the folder of the fleet that starts, which takes over what is there.
        shared_memory: where the folders are.
    """
    found = sorted(shared_memory.glob(f"epd-up-{os.getuid()}-*"))
    named = [one for one in found if OWN.fullmatch(one.name) and one != kept_folder]
    return [folder for folder in named if _remove_abandoned(folder)]


def _remove_abandoned(folder: Path) -> bool:
    try:
        handle = _lock(folder)
    except (FolderTaken, OSError):  # it is in use, or no folder
        return False
    try:
        if os.fstat(handle).st_uid != os.getuid():
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(handle)


def _lock_made(folder: Path) -> int:
    """Make a folder and return a descriptor of it, which locks it until that is closed.

    Raises:
        FolderTaken: it is another's.
    """
    while True:
        make(folder)
        try:
            handle = _lock(folder)
        except FileNotFoundError:
            continue
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # a fleet that starts on another port has removed it meanwhile


def _lock(folder: Path) -> int:
    """Return a descriptor of a folder, which locks it until that is closed.

    Raises:
        FolderTaken: it is another fleet's.
        OSError: it is no folder.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # Two that start at the same moment both find their ports free. The lock ends with its
        # process.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise FolderTaken(f"{folder} is another fleet's: is one starting on this port?") from None
    return handle


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
