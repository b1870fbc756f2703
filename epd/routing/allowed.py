"""Which hosts may be registered; pure."""

from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit


def check_pattern(pattern: str) -> str:
    """A network, a host name, or `*.` and a domain.

    Raises:
        ValueError: it is none of them.
    """
    pattern = pattern.strip().lower()
    if "/" in pattern:
        return str(ip_network(pattern))
    name = pattern.removeprefix("*.")
    if not name or set(name) & set("*@[] ") or urlsplit(f"//{name}").hostname != name.split(":")[0]:
        try:
            return str(ip_network(pattern))
        except ValueError:
            raise ValueError(
                f"{pattern!r} is no host name, no *.domain and no network such as 10.0.0.0/8"
            ) from None
    return pattern


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
    networks = [ip_network(one) for one in patterns if _is_network(one)]
    return any(address in network for network in networks)


def _is_network(pattern: str) -> bool:
    try:
        ip_network(pattern)
    except ValueError:
        return False
    return True
