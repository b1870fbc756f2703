"""What a `redis://` URL says."""

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
"""No braces, which would choose the cluster slot, and nothing SCAN reads as a pattern."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """What a TLS connection is made with; None is the system's certificates, or no certificate.

    The server's certificate and name are always checked.
    """

    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Everything about a Redis store. Its `repr` holds no secret.

    Attributes:
        addresses: the server, or some nodes of the cluster.
        cluster: whether this is a Redis Cluster.
        db: number of the database, 0 in a cluster.
        tls: None for a plain connection.
        username: ACL user, None for the default one.
        password: as given, None where there is none or `password_file` has it.
        password_file: read at every connection, so that a password can be rotated.
        prefix: what every key begins with.
        ttl_s: how long an entry is kept after its last use.
        max_entry_bytes: largest entry, header included; by default the largest value that a server
            takes by default (`proto-max-bulk-len`).
        timeout_s: longest time of a call, or of each step of one that goes over all entries.
        connect_timeout_s: longest wait for a connection.
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
        """Refuse what cannot work."""
        if min(self.ttl_s, self.timeout_s, self.connect_timeout_s) < 0.001:  # noqa: PLR2004
            raise ValueError("ttl, timeout and connect_timeout are at least 1ms")
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix holds letters, digits and . _ : - only")
        if self.cluster and self.db:
            raise ValueError("a cluster has database 0 only")


def redis_options(url: str, environment: Mapping[str, str] = os.environ) -> RedisOptions:
    """Read a URL. No message repeats any part of it that could hold a secret.

    Args:
        url: `redis://user:password@host:6379/0?ttl=7d`, `rediss://` for TLS,
            `redis+cluster://host1:6379,host2:6379` and `rediss+cluster://` for a cluster.
        environment: where user and password are found that the URL does not give.

    Raises:
        ValueError: it is no such URL, or has an unknown or wrong parameter.
    """
    parts = urlsplit(url)
    secure = parts.scheme.startswith("rediss")
    given = parameters(url, _PARAMETERS)
    tls = Tls(*(given.pop(f"ssl_{name}", None) for name in ("ca_certs", "certfile", "keyfile")))
    if tls != Tls() and not secure:
        raise ValueError("the ssl_ parameters go with rediss://")
    userinfo, _, hosts = parts.netloc.rpartition("@")
    cluster = parts.scheme.endswith("+cluster")
    addresses = tuple(map(_address, hosts.split(",")))
    if len(addresses) > 1 and not cluster:
        raise ValueError("several servers go with redis+cluster://")
    username, password = _credentials(userinfo, "password_file" in given, environment)
    return RedisOptions(
        addresses=addresses,
        cluster=cluster,
        db=_db(parts),
        tls=tls if secure else None,
        username=username,
        password=password,
        **{_FIELDS.get(name, name): value for name, value in given.items()},
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
        raise ValueError("give the password in the URL or in password_file, not in both")
    if not password and not has_file:
        password = environment.get(PASSWORD_VARIABLE, "")
    username = username or environment.get(USERNAME_VARIABLE, "")
    if username and not password and not has_file:
        raise ValueError(f"the user has no password: password_file or {PASSWORD_VARIABLE}")
    return username or None, password or None


def _address(text: str) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        raise ValueError("the server is not host or host:port") from None
    return Address(parts.hostname or "localhost", port)


def _db(parts: SplitResult) -> int:
    text = parts.path.strip("/") or "0"
    if not (text.isascii() and text.isdigit()):
        raise ValueError("the path of the URL is not the number of a database")
    return int(text)
