"""Patterns of the hosts that may be registered."""

import re
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


def check_pattern(pattern: str) -> str:
    """Return a valid pattern in canonical form: a network, a host name, or `*.` and a domain.

    Raises:
        ValueError: the pattern is invalid.
    """
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
    try:
        address = ip_address(host)
    except ValueError:
        return any(
            host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in patterns
        )
    return any(address in ip_network(one) for one in patterns if "/" in one)
