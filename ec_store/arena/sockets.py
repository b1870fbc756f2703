"""Sockets of the servers of arenas: where they are, in which folders, and how a server gets one."""

import errno
import fcntl
import os
import socket
import stat
import weakref
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


def check_folder(folder: Path) -> None:
    """Raise OSError if every user may write to a folder, and so replace the socket in it.

    A folder in /tmp must be of this user or of root: any other could have made it before.
    """
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH:
        raise PermissionError(errno.EACCES, f"every user may write to {folder}: chmod o-w")
    anyones = folder.parent.stat().st_mode & stat.S_IWOTH
    if anyones and found.st_uid not in {0, os.geteuid()}:
        raise PermissionError(errno.EACCES, f"another user has made {folder}")


def bind(path: Path, mode: int) -> socket.socket:
    """Return the socket of a path, as the only server of it; it does not listen yet.

    The kernel checks the permissions of the socket and of its folder when a client connects. A
    socket that a killed server has left is replaced.

    Args:
        path: path of the socket; a file beside it is locked.
        mode: permissions of the socket, such as 0600.

    Raises:
        OSError: another server listens there, or the path cannot be used: it is another file, say,
            or every user may write to its folder.
    """
    check_folder(path.parent)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(f"{path}.lock", flags, 0o600)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EADDRINUSE, "another server listens there") from None
        if path.is_socket():
            path.unlink()
        listener.bind(str(path))
        path.chmod(mode)
    except OSError:
        listener.close()
        os.close(lock)
        raise
    weakref.finalize(listener, os.close, lock)
    return listener


def _temporary(user: int) -> Path:
    return Path(f"/tmp/{FOLDER}-{user}")  # noqa: S108 - `is_trusted` checks its owner
