"""Places of the sockets of arenas on a host, where commands find the servers that run."""

import errno
import os
import socket
import stat
from pathlib import Path

FOLDER = "ec-store"
SYSTEM = Path("/run") / FOLDER
"""Folder of root's servers, which other users may connect to if the socket's mode allows it."""

MAX_FOLDER_BYTES = 64
"""Upper bound of the path of a runtime folder, which leaves room for the names in it: the path of a
socket has at most 100 bytes."""

PROBE_S = 0.5


def runtime_folder() -> Path:
    """Return the folder of this user's sockets, which may not exist yet.

    It is /run/ec-store for root, and for others `ec-store` in `XDG_RUNTIME_DIR`. Without that
    variable, as in a container, it is /tmp/ec-store-UID.
    """
    user = os.geteuid()
    if user == 0:
        return SYSTEM
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if given.startswith("/") and len(os.fsencode(given)) <= MAX_FOLDER_BYTES:
        return Path(given) / FOLDER
    return _temporary(user)


def default_socket() -> Path:
    """Return the path of the socket of a URL without one."""
    return runtime_folder() / "arena.sock"


def find_sockets() -> list[Path]:
    """Return the sockets of running servers of this user, and of root where it may connect."""
    folders = dict.fromkeys([runtime_folder(), _temporary(os.geteuid()), SYSTEM])
    found = [
        path
        for folder in folders
        for pattern in ("*.sock", "*/*.sock")
        for path in sorted(folder.glob(pattern))
    ]
    return [path for path in found if is_served(path) and is_trusted(path.parent)]


def is_served(path: Path) -> bool:
    """Return whether a server listens on a socket to which this process may connect."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def is_trusted(folder: Path) -> bool:
    """Return whether only root and this user can put a socket into a folder, or its group can."""
    found = folder.stat()
    return found.st_uid in {0, os.geteuid()} and not found.st_mode & stat.S_IWOTH


def make_folder(folder: Path) -> None:
    """Create a folder for this user alone, unless it exists.

    Raises:
        OSError: it cannot be created, or another user could put a socket of its own into it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_trusted(folder):
        text = "another user may replace the sockets in this folder: use one of your own"
        raise PermissionError(errno.EPERM, text, str(folder))


def _temporary(user: int) -> Path:
    return Path(f"/tmp/{FOLDER}-{user}")  # noqa: S108 - `is_trusted` checks its owner
