"""Which hosts may be registered."""

import re
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


def check_pattern(pattern: str) -> str:
    """A network, a host name, or `*.` and a domain.

    Raises:
        ValueError: it is none of them.
    """
    written = pattern.strip().lower()
    with suppress(ValueError):
        return str(ip_network(written))
    if NAME.fullmatch(written) is None:
        raise ValueError(
            f"{pattern!r} is no host name, no *.domain and no network such as 10.0.0.0/8"
        )
    return written


def is_allowed(url: str, patterns: Sequence[str]) -> bool:
    """Whether a URL's host is among them; all are where there are none.

    A name is allowed by name alone: what it leads to today it need not lead to tomorrow.
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
