"""Encoder store of a fleet without `--ec-store`: a memory of the host, and its socket's folder."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from ec_store.arena.memory import HUGE_PAGE_BYTES, default_bytes
from ec_store.arena.sockets import is_served, make_folder, runtime_folder
from ec_store.arena.url import arena_options

MIB = 2**20


class FolderTaken(Exception):
    """Error of a folder that belongs to another fleet."""


def socket_folder(port: int) -> Path:
    """Return the folder of the socket of the fleet with this port, which is not created."""
    return runtime_folder() / f"epd-up-{port}"


def memory_url(folder: Path, size_bytes: int | None) -> str:
    """Return the URL of a memory, in whole huge pages.

    Args:
        folder: folder of its socket.
        size_bytes: size that the operator chose; None: `default_bytes`.
    """
    size_bytes = size_bytes or default_bytes()
    size_mib = -(-size_bytes // HUGE_PAGE_BYTES) * (HUGE_PAGE_BYTES // MIB)
    return f"shm://{quote(str(folder / 'arena.sock'))}?max_bytes={size_mib}MiB"


def has_server(url: str) -> bool:
    """Return whether the URL of a store names a memory for which a server runs already."""
    return url.startswith("shm:") and is_served(Path(arena_options(url).path))


@contextmanager
def private_folder(folder: Path) -> Iterator[None]:
    """Create and lock a folder for this process, and delete it at the end of the context.

    It takes over a folder that a killed fleet has left.

    Raises:
        FolderTaken: another fleet has locked it.
        OSError: it cannot be created, or belongs to another user.
    """
    handle = _lock_made(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _lock_made(folder: Path) -> int:
    """Create a folder, and return a descriptor that locks it until the descriptor is closed."""
    while True:
        make_folder(folder.parent)
        make_folder(folder)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            # Two fleets that start at the same moment both find their ports free. The lock ends
            # with its process.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise FolderTaken(f"{folder} is in use: is a fleet starting on this port?") from None
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # the fleet that had it on this port removed it in the meantime
