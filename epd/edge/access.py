"""Access to routes: the class of access that a route is declared with, and its checks."""

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
"""Headers of requests that a proxy or a web page sends on behalf of another client. The sender of
such a request is on this machine, but the client behind it may be on any other."""
FROM = "Sec-Fetch-Site"
"""Header that a browser sets to the relation of the page's origin to this origin; scripts cannot
forge it."""
OWN_PAGE = "same-origin"


class Access(Enum):
    """Classes of access: the clients that a route answers."""

    OPEN = "open"
    """All clients, without a key."""
    TENANT = "tenant"
    """Clients with an API key; all clients if no API keys are configured."""
    ADMIN = "admin"
    """Clients with the admin key; without a configured one, clients on this machine."""
    REGISTRAR = "registrar"
    """Clients with the admin key; without a configured one, no client."""


def bearer(headers: Headers) -> str:
    """Return the bearer key of a request; an empty string if it has no key or several."""
    match headers.getall("Authorization", ()):
        case [one]:
            scheme, _, key = one.partition(" ")
            return key.strip() if scheme.lower() == "bearer" else ""
        case _:
            return ""


def client_key(headers: Headers, header: str) -> str:
    """Return the client's key of a request; an empty string if it has no key or several.

    Args:
        headers: headers of the request.
        header: header that carries the key if there is no `Authorization`.
    """
    if "Authorization" in headers:
        return bearer(headers)
    match headers.getall(header, ()):
        case [one]:
            return one
        case _:
            return ""


def check_admin(admin_key: SecretStr | None, headers: Headers, peer: str | None) -> None:
    """Raise an error unless a request may use the operator's routes.

    Args:
        admin_key: configured admin key; None if there is none.
        headers: headers of the request.
        peer: address of the connection's other end, which no header can change.

    Raises:
        Unauthorized: the headers lack the configured admin key.
        RequestRefused: no admin key is configured, and the request comes from another machine
            (403).
    """
    if admin_key is not None:
        presented = headers.getall("X-API-Key", None) or [bearer(headers)]
        if len(presented) != 1 or not _same(presented[0], admin_key.get_secret_value()):
            raise Unauthorized("the admin key is required: X-API-Key: <key>")
    elif not is_local(headers, peer):
        raise RequestRefused(
            403,
            "without EPD_ADMIN_API_KEY this route answers only clients on the proxy's own machine",
            slug="admin_only",
        )


def check_registrar(admin_key: SecretStr | None, headers: Headers) -> None:
    """Raise an error unless a request may register instances, which then get clients' requests.

    Raises:
        RequestRefused: the headers lack the admin key, or none is configured (403, as vLLM's
            `disagg_epd_proxy.py` answers).
    """
    try:
        if admin_key is not None:
            check_admin(admin_key, headers, None)
            return
    except Unauthorized:
        pass
    raise RequestRefused(403, "the admin key is required: X-API-Key: <key>", slug="admin_only")


def is_local(headers: Headers, peer: str | None) -> bool:
    """Return whether a client on this machine sends the request on its own behalf.

    `Host` must be a loopback address or `localhost`: with DNS rebinding, a web page reaches a
    loopback address under a foreign host name.
    """
    try:
        host = urlsplit(f"//{headers.get('Host', '')}").hostname
    except ValueError:
        return False
    return (
        _is_loopback(peer)
        and (host == "localhost" or _is_loopback(host))
        and not any(name in headers for name in ON_BEHALF)
        # The page `/ui` may send GET: a browser adds no Origin to GET of the same origin.
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
    """Compare keys by their digests, so that the time reveals neither the key nor its length."""
    one, other = (
        hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        for text in (presented, key)
    )
    return hmac.compare_digest(one, other)
