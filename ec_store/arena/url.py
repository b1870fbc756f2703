"""Options in a `shm://` URL."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from ec_store.arena.sockets import default_socket
from ec_store.config import duration_s, octal, parameters, size_bytes

MAX_PATH_BYTES = 100
"""Limit of `sockaddr_un` (unix(7)), less the name of the lock beside the socket."""


@dataclass(frozen=True, slots=True)
class ArenaOptions:
    """Options of a store in a host's memory.

    Attributes:
        path: path of the server's Unix socket.
        timeout_s: upper bound of a call's duration.
        verify: share of the reads that are compared with their checksum, from 0 to 1.
        max_bytes: size of the memory. This and the following are for the server.
        ttl_s: seconds that an entry is kept after its last use.
        mode: permissions of the socket: with 0660, the group of its folder may connect too.
    """

    path: str
    timeout_s: float = 1.0
    verify: float = 0.01
    max_bytes: int = 8 * 2**30
    ttl_s: float = 7 * 86400.0
    mode: int = 0o600


def arena_options(url: str) -> ArenaOptions:
    """Parse a URL such as `shm:///run/ec-store/arena.sock?max_bytes=64GiB`.

    Without a path, as in `shm://?max_bytes=64GiB`, it is that of `default_socket`.

    Raises:
        ValueError: the path is relative or too long, or a parameter is unknown or invalid.
    """
    parts = urlsplit(url)
    path = unquote(parts.path) or str(default_socket())
    if parts.netloc or not path.startswith("/") or parts.fragment:
        raise ValueError(f"{url!r} is not of the form shm:///path/of/the/socket")
    if len(path.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"the path of the socket has more than {MAX_PATH_BYTES} bytes")
    options = ArenaOptions(path, **parameters(url, _PARAMETERS, _FIELDS))
    if options.timeout_s <= 0 or options.max_bytes <= 0 or options.ttl_s <= 0:
        raise ValueError("timeout, max_bytes and ttl must be greater than 0")
    return options


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError(f"{text!r} is not a share from 0 to 1")
    return share


_PARAMETERS: Mapping[str, Any] = {
    "timeout": duration_s,
    "verify": _share,
    "max_bytes": size_bytes,
    "ttl": duration_s,
    "mode": octal,
}
_FIELDS = {"timeout": "timeout_s", "ttl": "ttl_s"}
