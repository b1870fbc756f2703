"""Folder of the encoder store of a fleet without `--ec-store`: its place, lock and removal."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it is checked to be this user's
OWN = re.compile(r"epd-up-[0-9]+-[0-9]{1,5}")
"""Name of a fleet's folder in shared memory, with the user's id and the proxy's port."""
LEAST_BYTES = 2 * 2**30
MOST_BYTES = 64 * 2**30


class FolderTaken(Exception):
    """Error of a folder that belongs to another user or fleet."""


def default_folder(port: int, logs: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return a folder in shared memory if that has room, otherwise beside the logs.

    The folder is not created. A run after a killed one on the same port takes over the entries that
    it left in shared memory.
    """
    if shared_memory.is_dir() and _quota_bytes(shared_memory) >= LEAST_BYTES:
        return shared_memory / f"epd-up-{os.getuid()}-{port}"
    return logs.absolute() / "ec-store"


def default_url(folder: Path) -> str:
    """Return a store URL for a folder, with a quota of half the free space, at most 64 GiB."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return f"{folder.as_uri()}?max_bytes={min(MOST_BYTES, _quota_bytes(existing))}"


def _quota_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free // 2


@contextmanager
def private_folder(folder: Path) -> Iterator[None]:
    """Create and lock a folder for this process, and delete it at the end of the context.

    Raises:
        FolderTaken: the folder belongs to another user or fleet; it is not deleted.
    """
    handle = _lock_made(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_abandoned(kept_folder: Path, shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's folders of ended fleets in shared memory, and return them.

    The starting fleet takes over the entries in `kept_folder`. A fleet locks its folder, and the
    kernel releases the lock when the fleet's process ends. So a folder that can be locked has no
    owner. A process id would prove nothing, because ids are reused.
    """
    found = sorted(shared_memory.glob(f"epd-up-{os.getuid()}-*"))
    named = [folder for folder in found if OWN.fullmatch(folder.name) and folder != kept_folder]
    return [folder for folder in named if _remove_abandoned(folder)]


def _remove_abandoned(folder: Path) -> bool:
    try:
        handle = _lock(folder)
    except (FolderTaken, OSError):  # in use, or not a folder
        return False
    try:
        if os.fstat(handle).st_uid != os.getuid():
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(handle)


def _lock_made(folder: Path) -> int:
    """Create a folder, and lock it as `_lock` does."""
    while True:
        make(folder)
        try:
            handle = _lock(folder)
        except FileNotFoundError:
            continue
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # a fleet starting on another port removed it in the meantime


def _lock(folder: Path) -> int:
    """Return a descriptor that locks a folder until the descriptor is closed.

    Raises:
        FolderTaken: another fleet has locked the folder.
        OSError: it is not a folder.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # Two fleets that start at the same moment both find their ports free. The lock ends with
        # its process.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise FolderTaken(f"{folder} is in use: is a fleet starting on this port?") from None
    return handle


def make(folder: Path) -> None:
    """Create the folder, unless an earlier run left it.

    Raises:
        FolderTaken: the folder belongs to another user, or is a link.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or folder.is_symlink():
        raise FolderTaken(f"{folder} belongs to another user: name another one with --ec-store")
