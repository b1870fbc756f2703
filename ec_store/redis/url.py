"""Options in a `redis://` URL."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from ec_store.config import duration_s, parameters, size_bytes

USERNAME_VARIABLE = "EC_STORE_REDIS_USERNAME"
PASSWORD_VARIABLE = "EC_STORE_REDIS_PASSWORD"  # noqa: S105 - a name
DEFAULT_PORT = 6379

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""Excludes braces, which select the cluster slot, and the wildcards of SCAN's patterns."""

PERMITS = 4
"""Number of large entries that may be written at once: as many as keep a server's core busy."""


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate files of a TLS connection.

    Without `ca_certs` the system's CA certificates apply, and without `certfile` there is no client
    certificate. The server's certificate and name are always checked.
    """

    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Options of a Redis store. Its `repr` contains no secret.

    Attributes:
        addresses: the server, or some nodes of the cluster.
        cluster: whether this is a Redis Cluster.
        db: number of the database, 0 in a cluster.
        tls: certificate files; None for a plain connection.
        username: ACL user; None for the default user.
        password: the password; None if there is none, or if `password_file` holds it.
        password_file: file that is read at every connection, so that a password can be rotated.
        prefix: first part of every key's name.
        ttl_s: seconds that an entry is kept after its last use.
        max_entry_bytes: size of the largest entry, header included; by default the default limit of
            a server for a value (`proto-max-bulk-len`).
        timeout_s: upper bound of a call's duration, or of each step of a call that visits all
            entries.
        connect_timeout_s: upper bound of the wait for a connection.
    """

    addresses: tuple[Address, ...]
    cluster: bool = False
    db: int = 0
    tls: Tls | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    prefix: str = "epd:ec"
    ttl_s: float = 7 * 86400.0
    max_entry_bytes: int = 512 * 2**20
    timeout_s: float = 5.0
    connect_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if min(self.ttl_s, self.timeout_s, self.connect_timeout_s) < 0.001:  # noqa: PLR2004
            raise ValueError("ttl, timeout and connect_timeout must be at least 1ms")
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix must have 1 to 128 characters: letters, digits and . _ : -")
        if self.cluster and self.db:
            raise ValueError("a cluster has only database 0: remove the number from the URL")


def redis_options(url: str, environment: Mapping[str, str] = os.environ) -> RedisOptions:
    """Parse a URL. No error message repeats a part of it that could contain a secret.

    Args:
        url: `redis://user:password@host:6379/0?ttl=7d`, `rediss://` for TLS,
            `redis+cluster://host1:6379,host2:6379` and `rediss+cluster://` for a cluster.
        environment: variables that hold the user and password which the URL does not give.

    Raises:
        ValueError: the URL is invalid, or has an unknown or invalid parameter.
    """
    parts = urlsplit(url)
    secure = parts.scheme.startswith("rediss")
    options = parameters(url, _PARAMETERS, _FIELDS)
    tls = Tls(*(options.pop(f"ssl_{name}", None) for name in ("ca_certs", "certfile", "keyfile")))
    if tls != Tls() and not secure:
        raise ValueError("the ssl_ parameters need a rediss:// URL")
    userinfo, _, hosts = parts.netloc.rpartition("@")
    cluster = parts.scheme.endswith("+cluster")
    addresses = tuple(map(_address, hosts.split(",")))
    if len(addresses) > 1 and not cluster:
        raise ValueError("several servers need a redis+cluster:// URL")
    username, password = _credentials(userinfo, "password_file" in options, environment)
    return RedisOptions(
        addresses=addresses,
        cluster=cluster,
        db=_db(parts),
        tls=tls if secure else None,
        username=username,
        password=password,
        **options,
    )


_PARAMETERS: Mapping[str, Any] = {
    "max_entry_bytes": size_bytes,
    "ttl": duration_s,
    "timeout": duration_s,
    "connect_timeout": duration_s,
    "prefix": str,
    "password_file": Path,
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
}
_FIELDS = {"ttl": "ttl_s", "timeout": "timeout_s", "connect_timeout": "connect_timeout_s"}


def _credentials(
    userinfo: str, has_file: bool, environment: Mapping[str, str]
) -> tuple[str | None, str | None]:
    username, _, password = (unquote(part) for part in userinfo.partition(":"))
    if password and has_file:
        raise ValueError("the password is in the URL and in password_file: remove one of them")
    if not password and not has_file:
        password = environment.get(PASSWORD_VARIABLE, "")
    username = username or environment.get(USERNAME_VARIABLE, "")
    if username and not password and not has_file:
        raise ValueError(f"the user has no password: set password_file or {PASSWORD_VARIABLE}")
    return username or None, password or None


def _address(text: str) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        raise ValueError("the server in the URL must be host or host:port") from None
    return Address(parts.hostname or "localhost", port)


def _db(parts: SplitResult) -> int:
    text = parts.path.strip("/") or "0"
    if not (text.isascii() and text.isdigit()):
        raise ValueError("the path of the URL must be the number of a database, such as /0")
    return int(text)
