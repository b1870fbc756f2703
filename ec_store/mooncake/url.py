"""Options in a `mooncake://` URL."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ec_store.config import duration_s, parameters, size_bytes

DEFAULT_PORT = 50051

_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Excludes what has a meaning in a regular expression: a purge removes names by one."""

_PROTOCOLS = ("tcp", "rdma")
_SEGMENT_STEP = 16 * 2**20


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """Options of a tier in Mooncake Store.

    Attributes:
        master: `host:port` of `mooncake_master`.
        metadata: metadata service of the transfers; `P2PHANDSHAKE` needs none.
        segment_bytes: memory that this host contributes, on top of its arena; 0 for none.
        protocol: `tcp` or `rdma`.
        devices: RDMA devices, separated by commas; all if empty.
        host: address at which other hosts reach this one; None for that of the route to the master.
        prefix: first part of every key's name.
        replicas: number of segments that get each entry.
        max_entry_bytes: size of the largest entry, header included.
        timeout_s: upper bound of each step of a call. A client that exceeds it is replaced.
        claims: URL of the Redis that has the claims; None without claims.
    """

    master: str
    metadata: str = "P2PHANDSHAKE"
    segment_bytes: int = 0
    protocol: str = "tcp"
    devices: str = ""
    host: str | None = None
    prefix: str = "epd-ec"
    replicas: int = 1
    max_entry_bytes: int = 128 * 2**20
    timeout_s: float = 10.0
    claims: str | None = None

    def __post_init__(self) -> None:
        if self.protocol not in _PROTOCOLS:
            raise ValueError(f"protocol must be one of {', '.join(_PROTOCOLS)}")
        if self.segment_bytes % _SEGMENT_STEP:
            raise ValueError("segment must be a multiple of 16MiB")
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix must have 1 to 64 characters: letters, digits and _ -")
        if not 1 <= self.replicas <= 8:  # noqa: PLR2004
            raise ValueError("replicas must be from 1 to 8")
        if self.max_entry_bytes < 2**20:
            raise ValueError("max_entry_bytes must be at least 1MiB")
        if self.timeout_s < 0.01:  # noqa: PLR2004
            raise ValueError("timeout must be at least 10ms")

    def own_host(self) -> str:
        """Return the address of this host for others; raise OSError if no route is known."""
        if self.host is not None:
            return self.host
        parts = urlsplit(f"//{self.master}")
        host, port = parts.hostname or "localhost", parts.port or DEFAULT_PORT
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as probe:  # sends nothing
            probe.connect(address)
            return str(probe.getsockname()[0])


def mooncake_options(url: str) -> MooncakeOptions:
    """Parse a URL.

    Args:
        url: `mooncake://master:50051?segment=64GiB&protocol=rdma&claims=redis://ec-redis`.

    Raises:
        ValueError: the URL is invalid, or has an unknown or invalid parameter.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.path.strip("/"):
        raise ValueError("a mooncake:// URL is mooncake://master:port?…, without user and path")
    try:
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        raise ValueError("the master in the URL must be host or host:port") from None
    if not parts.hostname:
        raise ValueError("a mooncake:// URL must name the host of the master")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return MooncakeOptions(master=f"{host}:{port}", **parameters(url, _PARAMETERS, _FIELDS))


def _claims(text: str) -> str:
    """Check the URL of a Redis; its password must not be in a URL that contains another."""
    parts = urlsplit(text)
    if parts.scheme.partition("+")[0] not in {"redis", "rediss"}:
        raise ValueError("it must be the URL of a Redis, such as redis://ec-redis:6379/0")
    if parts.password:
        raise ValueError("set the password by EC_STORE_REDIS_PASSWORD or password_file")
    return text


_PARAMETERS: Mapping[str, Any] = {
    "metadata": str,
    "segment": size_bytes,
    "protocol": str,
    "devices": str,
    "host": str,
    "prefix": str,
    "replicas": int,
    "max_entry_bytes": size_bytes,
    "timeout": duration_s,
    "claims": _claims,
}
_FIELDS = {"segment": "segment_bytes", "timeout": "timeout_s"}
