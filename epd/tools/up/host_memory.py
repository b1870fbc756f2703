"""Encoder store of a fleet without `--ec-store`: a memory of the host, and its socket's folder."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from ec_store.arena.memory import HUGE_PAGE_BYTES, default_bytes
from ec_store.arena.sockets import is_served, make_folder
from ec_store.arena.url import arena_options

MIB = 2**20
SOCKET = "arena.sock"


def memory_url(folder: Path, size_bytes: int | None) -> str:
    """Return the URL of a memory, in whole huge pages.

    Args:
        folder: folder of its socket.
        size_bytes: size that the operator chose; None: `default_bytes`.
    """
    size_bytes = size_bytes or default_bytes()
    size_mib = -(-size_bytes // HUGE_PAGE_BYTES) * (HUGE_PAGE_BYTES // MIB)
    return f"shm://{quote(str(folder / SOCKET))}?max_bytes={size_mib}MiB"


def has_server(url: str) -> bool:
    """Return whether the URL of a store names a memory for which a server runs already."""
    return url.startswith("shm:") and is_served(Path(arena_options(url).path))


@contextmanager
def private_folder(folder: Path) -> Iterator[None]:
    """Create a folder for the socket, and delete it at the end of the context.

    It may be one that a killed fleet has left. It stays if another fleet uses it.

    Raises:
        OSError: it cannot be created, or belongs to another user.
    """
    make_folder(folder.parent)
    make_folder(folder)
    try:
        yield
    finally:
        if not is_served(folder / SOCKET):
            shutil.rmtree(folder, ignore_errors=True)
