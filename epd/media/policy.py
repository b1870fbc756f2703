"""The policy for remote media that the proxy fetches: URLs, hosts and addresses.

There is only one parser: the checked `yarl.URL` is the object that aiohttp requests. A second
parser between check and use could bypass the policy (CVE-2026-24779).
"""

import re
from ipaddress import ip_address, ip_network

from yarl import URL

from epd.config.sections.limits import MediaSettings
from epd.errors import BadRequest

MAX_URL = 8190
"""Maximum length of a URL in characters; the common limit of servers for a request line."""

NO_ADDRESS = "the host has no address that the media policy allows"
NO_NAME_OR_ADDRESS = (
    "the host's name does not exist, or it has no address that the media policy allows"
)

NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\.?", re.IGNORECASE)
"""A last label that makes resolvers read a name as an IPv4 address (`127.1`, `0x7f.1`)."""

GLOBAL_UNICAST = ip_network("2000::/3")
"""The assigned range of IPv6. IPv4-mapped (`::ffff:0:0/96`) and NAT64 (`64:ff9b::/96`,
`64:ff9b:1::/48`) addresses, which represent an IPv4 address, are outside."""

# IANA's special-purpose registries, copied here because `ipaddress.is_global` differs between patch
# releases of Python.
NOT_PUBLIC = tuple(
    ip_network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        # Protocol assignments with Teredo, documentation, 6to4.
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
        # Azure's platform channel has a public address.
        "168.63.129.16/32",
    )
)

INSIDE = tuple(
    ip_network(text)
    for text in (
        *("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
        *("::1/128", "fc00::/7"),
    )
)
"""Networks that `--allow-private-media` adds. Link-local, where clouds serve credentials, is
excluded."""

CLOUD_METADATA = tuple(ip_network(text) for text in ("100.100.100.200/32", "fd00:ec2::/32"))
"""Metadata services of Alibaba and AWS, which serve credentials, in otherwise private ranges."""


def check_url(settings: MediaSettings, text: str, base: URL | None = None) -> URL:
    """Return the URL to request for `text`, which may be relative to `base` in a redirect.

    Raises:
        BadRequest: the URL is not allowed.
    """
    url = _parsed(text, base)
    if url.scheme == "http" and not settings.allow_http_media:
        raise refused_url(
            "the URL must start with https://; --allow-http-media would allow http://"
        )
    if url.scheme not in {"http", "https"}:
        raise refused_url("the URL must start with https://")
    if url.raw_user is not None or url.raw_password is not None:
        raise refused_url("the URL must not have a user")
    host = url.raw_host
    if not host or "%" in host:
        raise refused_url("the URL must have a host")
    if settings.allowed_media_domains and host.rstrip(".") not in settings.allowed_media_domains:
        raise refused_url("the host is not in --allowed-media-domains")
    number = ":" in host or NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]) is not None
    if number and not allows_address(settings, host):
        raise refused_url(NO_ADDRESS)
    return url


def allows_address(settings: MediaSettings, text: str) -> bool:
    """Return whether a connection to this IP address is allowed."""
    try:
        address = ip_address(text)
    except ValueError:  # it has a zone, or is not an address
        return False
    if any(address in network for network in CLOUD_METADATA):
        return False
    if settings.allow_private_media and any(address in network for network in INSIDE):
        return True
    if address.version == GLOBAL_UNICAST.version and address not in GLOBAL_UNICAST:
        return False
    return not any(address in network for network in NOT_PUBLIC)


def refused_url(message: str) -> BadRequest:
    """Return the error for a URL that the policy rejects."""
    return BadRequest(message, slug="media_not_allowed")


def _parsed(text: str, base: URL | None) -> URL:
    if len(text) > MAX_URL:
        raise refused_url(f"the URL is longer than {MAX_URL} characters")
    if "\\" in text or any(character <= " " or character == "\x7f" for character in text):
        raise refused_url("the URL contains a character that must be percent-encoded")
    try:
        url = URL(text)
        return (url if base is None else base.join(url)).with_fragment(None)
    except ValueError:
        raise refused_url("not a valid URL") from None
