"""Options in a `shm+tcp://` or `shm+tls://` URL: the memories of other hosts, for a proxy."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from ec_store.arena.protocol import MAX_KEY_CHARACTERS
from ec_store.config import duration_s, parameters

KEY_VARIABLE = "EC_STORE_API_KEY"
"""Environment variable with the key of the servers, in a server and in a proxy."""

DEFAULT_PORT = 8101
TIMEOUT_S = 1.0

SCHEMES = ("shm+tcp", "shm+tls")
"""A host's memory over TCP, and over TLS. The server's certificate and name are checked."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Options of the memories of other hosts. Its `repr` has no secret.

    Attributes:
        host: host of the server; empty: each instance publishes the server of its own host.
        port: its port.
        secure: whether connections have TLS.
        key: key of the servers.
        ssl_ca_certs: file with the CAs that sign their certificates; None: the system's CAs.
        server_name: name in their certificates; None: the host of each.
        timeout_s: upper bound of a call's duration, and of a connection.
    """

    host: str
    port: int
    secure: bool
    key: str = field(default="", repr=False)
    ssl_ca_certs: str | None = None
    timeout_s: float = TIMEOUT_S
    server_name: str | None = None

    def at(self, host: str, port: int) -> "RemoteOptions":
        """Return the same options for another server."""
        return replace(self, host=host, port=port)


def remote_options(url: str, environment: Mapping[str, str] = os.environ) -> RemoteOptions:
    """Parse a URL such as `shm+tls://host:8101?ssl_ca_certs=/etc/ca.pem`.

    Raises:
        ValueError: the URL is invalid, or has an unknown or invalid parameter.
    """
    parts = urlsplit(url)
    try:
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        port = 0
    if parts.scheme not in SCHEMES or parts.path not in {"", "/"} or parts.fragment or not port:
        raise ValueError(f"the URL of another host's memory must be {parts.scheme}://host:port")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"the key is not in the URL: set {KEY_VARIABLE}")
    options = parameters(url, _PARAMETERS, {"timeout": "timeout_s"})
    secure = parts.scheme == "shm+tls"
    for name in ("ssl_ca_certs", "server_name"):
        if name in options and not secure:
            raise ValueError(f"{name} needs a shm+tls:// URL")
        if options.get(name) == "":
            raise ValueError(f"{name} must not be empty")
    if options.get("timeout_s", TIMEOUT_S) <= 0:
        raise ValueError("timeout must be greater than 0")
    key = environment.get(KEY_VARIABLE, "")
    check_key(key)
    return RemoteOptions(parts.hostname or "", port, secure, key, **options)


_PARAMETERS = {"timeout": duration_s, "ssl_ca_certs": str, "server_name": str}


def is_of_hosts(url: str) -> bool:
    """Return whether a URL is of the memories of all hosts, each of which an instance names."""
    parts = urlsplit(url)
    return parts.scheme in SCHEMES and not parts.hostname


def check_key(key: str) -> None:
    """Raise ValueError for a key that no server has."""
    if not key:
        raise ValueError(f"the memory of a host needs a key over TCP: set {KEY_VARIABLE}")
    if not (key.isascii() and key.isprintable() and len(key) <= MAX_KEY_CHARACTERS):
        text = f"{KEY_VARIABLE} must have at most {MAX_KEY_CHARACTERS} printable ASCII characters"
        raise ValueError(text)
