"""Parsers of URLs, addresses, weights and host patterns in settings and registrations.

Each returns the value in its canonical form, and raises ValueError for an invalid one.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.parse import parse_qsl, urlsplit

from epd.http.http1 import http_url, is_address

DNS_PORT = 53

REDIS_PARAMETERS = {
    "redis": frozenset({"key"}),
    "rediss": frozenset({"key", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}),
}
"""Valid parameters of a Redis URL, by scheme. Others would fail at the first use, or place a
password where it is not protected."""


EVENTS_AT = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
EVENTS_IN = re.compile(r"ipc://[!-~]{1,107}")
EVENTS_OF = re.compile(r"(https?://.+)=((?:tcp|ipc)://.*)")

MIN_WEIGHT = 0.001
MAX_WEIGHT = 1000.0

NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


def base_url(url: str) -> str:
    """Return a valid base URL such as `http://host:8001`, host in lower case, no final slash.

    Raises:
        ValueError: the URL is invalid. The message contains no password.
    """
    if "@" in url:
        raise ValueError("must be a URL without a user and a password")
    if any(character <= " " for character in url):
        raise ValueError(f"{url!r} contains white space")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not a URL such as http://host:8001")
    if parts.query or parts.fragment:
        raise ValueError(f"{parts.netloc!r} must be a base URL: no query, no fragment")
    _ = parts.port  # raises ValueError for an invalid port
    written = f"{parts.scheme}://{parts.netloc.lower()}{parts.path}".rstrip("/")
    try:
        http_url(written)  # `urlsplit` accepts hosts that the HTTP client rejects
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL such as http://host:8001: {error}") from None
    return written


def service_url(service: str) -> str:
    """Return a base URL for a URL or for `host:port`, which means `http`."""
    if "://" in service:
        return base_url(service)
    url = base_url(f"http://{service}")
    if not urlsplit(url).port:
        raise ValueError(f"{service!r} is neither host:port nor a URL such as http://host:8001")
    return url


def at_address(url: str, address: str) -> str:
    """Return the URL with an address in place of its host."""
    parts = urlsplit(url)
    host = f"[{address}]" if ip_address(address).version == 6 else address  # noqa: PLR2004
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}{parts.path}"


def zmq_address(address: str) -> str:
    """Return a valid address of a ZMQ socket: `tcp://host:port`."""
    parts = urlsplit(address)
    plain = address == f"tcp://{parts.netloc}" and "@" not in address
    if not plain or not parts.hostname or not parts.port or any(c <= " " for c in address):
        raise ValueError(f"{address!r} is not an address such as tcp://host:19019")
    return address


def events_address(address: str) -> str:
    """Return a valid address such as `tcp://host:5557`, or `ipc:///a/path`."""
    found = EVENTS_AT.fullmatch(address)
    if found is not None and 0 < int(found[2]) < 2**16:
        return address
    if EVENTS_IN.fullmatch(address):
        return address
    raise ValueError(f"{address!r} is not an address such as tcp://host:5557")


def named_events_address(written: str) -> tuple[str, str]:
    """Return the instance's URL, empty for all others, and the address of `[URL=]ADDRESS`."""
    if (found := EVENTS_OF.fullmatch(written)) is not None:
        return service_url(found[1]), events_address(found[2])
    return "", events_address(written)


def name_server(server: str) -> tuple[str, int]:
    """Return address and port of a DNS server, written as `address` or `address:port`."""
    try:
        return str(ip_address(server.strip("[]"))), DNS_PORT
    except ValueError:
        parts = urlsplit(f"//{server}")
        return str(ip_address(parts.hostname or "")), parts.port or DNS_PORT


def registration_store_url(url: str) -> str:
    """Return a valid URL of a store for registrations.

    The message of an error quotes no part of it, because it may contain a password.
    """
    return _redis_url(url, "must be redis://host:6379 or rediss://host:6379")


def conversation_store_url(url: str) -> str:
    """Return a valid URL of a store for conversations, as `registration_store_url` does."""
    return _redis_url(url, "must be memory, redis://host:6379 or rediss://host:6379")


def _redis_url(url: str, expected: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in REDIS_PARAMETERS or not parts.hostname:
        raise ValueError(expected)
    try:
        _ = parts.port
    except ValueError:
        raise ValueError("its port is invalid") from None
    known = REDIS_PARAMETERS[parts.scheme]
    if wrong := {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - known:
        raise ValueError(f"unknown parameter {min(wrong)!r}; known: {', '.join(sorted(known))}")
    return url


def check_weight(weight: float) -> float:
    """Return a valid weight: 0, or one within the bounds."""
    if weight == 0 or MIN_WEIGHT <= weight <= MAX_WEIGHT:
        return weight
    raise ValueError(f"a weight is 0, or from {MIN_WEIGHT} to {MAX_WEIGHT:.0f}")


def weight_of(written: str) -> tuple[str, float]:
    """Return the instance's URL and the weight of a text such as `http://host:8001=2`.

    The message of an error contains no password.
    """
    url, equals, weight = written.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        equals = ""
    if not equals:
        raise ValueError("is not URL=WEIGHT, such as http://host:8001=2")
    return service_url(url), check_weight(number)


def check_pattern(pattern: str) -> str:
    """Return a valid pattern in canonical form: a network, a host name, or `*.` and a domain."""
    written = pattern.strip().lower()
    with suppress(ValueError):
        return str(ip_network(written))
    if NAME.fullmatch(written) is None:
        raise ValueError(
            f"{pattern!r} is not a host name, a *.domain or a network such as 10.0.0.0/8"
        )
    return written


def is_allowed(url: str, patterns: Sequence[str]) -> bool:
    """Return whether a URL's host matches a pattern. Without patterns, every host does.

    A host name is compared as text and not resolved, because its address may change.
    """
    if not patterns:
        return True
    host = (urlsplit(url).hostname or "").rstrip(".")
    if is_address(host):
        return any(
            ip_address(host) in ip_network(pattern) for pattern in patterns if "/" in pattern
        )
    return any(
        host == pattern or (pattern.startswith("*.") and host.endswith(pattern[1:]))
        for pattern in patterns
    )
