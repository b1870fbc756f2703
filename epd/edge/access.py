"""Who may use a route: the class of access it is declared with, and what opens it."""

import hashlib
import hmac
from enum import Enum
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from multidict import CIMultiDictProxy
from pydantic import SecretStr

from epd.errors import RequestRefused, Unauthorized

Headers = CIMultiDictProxy[str]

ON_BEHALF = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via", "Origin")
"""Headers of a request that a proxy or a web page makes: its sender is on this machine, and who
wants it need not be."""
FROM = "Sec-Fetch-Site"
"""Who has a browser send this; no web page can set it."""
OWN_PAGE = "same-origin"


class Access(Enum):
    """Whom a route answers."""

    OPEN = "open"
    """Everybody."""
    TENANT = "tenant"
    """Who has an API key, where such keys are configured; else everybody."""
    ADMIN = "admin"
    """Who has the admin key; where none is configured, clients on this machine."""
    REGISTRAR = "registrar"
    """Who has the admin key; where none is configured, nobody."""


def bearer(headers: Headers) -> str:
    """The key of a request; an empty string, which is no key, where it has none or several."""
    match headers.getall("Authorization", ()):
        case [one]:
            scheme, _, key = one.partition(" ")
            return key.strip() if scheme.lower() == "bearer" else ""
        case _:
            return ""


def client_key(headers: Headers, header: str) -> str:
    """The key of a request where its clients present it; an empty string where there is none.

    Args:
        headers: the request's.
        header: where keys are looked for that are not in `Authorization`.
    """
    if "Authorization" in headers:
        return bearer(headers)
    match headers.getall(header, ()):
        case [one]:
            return one
        case _:
            return ""


def check_admin(admin_key: SecretStr | None, headers: Headers, peer: str | None) -> None:
    """Let a request pass that may change or look into the fleet.

    Args:
        admin_key: the one that is configured.
        headers: the request's.
        peer: the address at the other end of its connection, which no header can change.

    Raises:
        Unauthorized: the admin key is not among its headers.
        RequestRefused: 403, there is no admin key, and it does not come from this machine.
    """
    if admin_key is not None:
        presented = headers.getall("X-API-Key", None) or [bearer(headers)]
        if len(presented) != 1 or not _same(presented[0], admin_key.get_secret_value()):
            raise Unauthorized("the admin key is needed: X-API-Key: <key>")
    elif not is_local(headers, peer):
        raise RequestRefused(
            403,
            "without EPD_ADMIN_API_KEY this answers clients on the proxy's own machine alone",
            slug="admin_only",
        )


def check_registrar(admin_key: SecretStr | None, headers: Headers) -> None:
    """Let a request pass that may say which instances there are, and so who reads all requests.

    Raises:
        RequestRefused: 403, as vLLM's `disagg_epd_proxy.py` answers: the admin key is not among its
            headers, or there is none.
    """
    try:
        if admin_key is not None:
            check_admin(admin_key, headers, None)
            return
    except Unauthorized:
        pass
    raise RequestRefused(403, "the admin key is needed: X-API-Key: <key>", slug="admin_only")


def is_local(headers: Headers, peer: str | None) -> bool:
    """Whether a client on this machine asks, and for itself.

    A `Host` that is a name of somebody else's is how a web page reaches a loopback address (DNS
    rebinding).
    """
    try:
        host = urlsplit(f"//{headers.get('Host', '')}").hostname
    except ValueError:
        return False
    return (
        _is_loopback(peer)
        and (host == "localhost" or _is_loopback(host))
        and not any(name in headers for name in ON_BEHALF)
        # The page `/ui` may ask: a browser adds no Origin to its GETs, and does to all else.
        and all(site == OWN_PAGE for site in headers.getall(FROM, ()))
    )


def _is_loopback(host: str | None) -> bool:
    try:
        address = ip_address(host or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _same(presented: str, key: str) -> bool:
    """Compare digests: how long it takes tells neither what the key is nor how long."""
    one, other = (
        hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        for text in (presented, key)
    )
    return hmac.compare_digest(one, other)
