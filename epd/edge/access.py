"""Access to routes: classes of access with their checks. Pure."""

import hashlib
import hmac
import re
from enum import Enum
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from multidict import CIMultiDictProxy
from pydantic import SecretStr

from epd.errors import RequestRefused, Unauthorized

Headers = CIMultiDictProxy[str]

ON_BEHALF = re.compile(
    r"forwarded|via|origin|x-real-ip|x-forwarded-.*|x-envoy-.*|cf-.*|.*client-ip.*", re.IGNORECASE
)
"""Names of headers of requests that a proxy or a web page sends on behalf of another client. The
sender of such a request is on this machine, but the client behind it may be on any other."""
FROM = "Sec-Fetch-Site"
"""Header that a browser sets to the relation of the page's origin to this origin; scripts cannot
forge it."""
OWN_PAGE = "same-origin"


class Access(Enum):
    """Classes of access: the clients that a route answers."""

    OPEN = "open"
    """Open to all clients, without a key."""
    TENANT = "tenant"
    """Clients with an API key; all clients if no API keys are configured."""
    ADMIN = "admin"
    """Clients with the admin key; without a configured one, the operator on this machine."""
    REGISTRAR = "registrar"
    """Clients with the admin key; without a configured one, no client."""


def single_value(headers: Headers, name: str) -> str:
    """Return the value of a header; an empty string if it is missing or repeated."""
    values = headers.getall(name, ())
    return values[0] if len(values) == 1 else ""


def bearer(headers: Headers) -> str:
    """Return the bearer key of a request; an empty string if it has no key or several."""
    scheme, _, key = single_value(headers, "Authorization").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def client_key(headers: Headers, header: str) -> str:
    """Return the key as `bearer` does, or from `header` if there is no `Authorization`."""
    return bearer(headers) if "Authorization" in headers else single_value(headers, header)


def check_admin(admin_key: SecretStr | None, headers: Headers, *, private: bool) -> None:
    """Raise an error unless a request may use the operator's routes.

    `private` is whether only this machine can have opened the connection, whatever its headers say.

    Raises:
        Unauthorized: the headers lack the configured admin key.
        RequestRefused: no admin key is configured, and the request may come from another machine
            (403).
    """
    if admin_key is not None:
        if not _has_key(headers, admin_key):
            raise Unauthorized("the admin key is required: X-API-Key: <key>")
    elif not (private and is_own(headers)):
        raise RequestRefused(
            403,
            "the proxy has no admin key: set EPD_ADMIN_API_KEY for it, and send the key as "
            "X-API-Key. Without it, this route answers only direct requests to a --host that is a "
            "loopback address, or by the proxy's own user to --uds",
            slug="admin_only",
        )


def check_registrar(admin_key: SecretStr | None, headers: Headers) -> None:
    """Raise an error unless a request may register instances, which then get clients' requests.

    Raises:
        RequestRefused: the headers lack the admin key, or none is configured (403, as vLLM's
            `disagg_epd_proxy.py` answers).
    """
    if admin_key is None or not _has_key(headers, admin_key):
        raise RequestRefused(403, "the admin key is required: X-API-Key: <key>", slug="admin_only")


def _has_key(headers: Headers, admin_key: SecretStr) -> bool:
    """Compare keys by their digests, so that the time reveals neither the key nor its length."""
    presented = single_value(headers, "X-API-Key") if "X-API-Key" in headers else bearer(headers)
    digests = (
        hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        for key in (presented, admin_key.get_secret_value())
    )
    return bool(presented) and hmac.compare_digest(*digests)


def is_own(headers: Headers) -> bool:
    """Return whether the client sends the request on its own behalf, to an address of this machine.

    `Host` must be a loopback address or `localhost`: with DNS rebinding, a web page reaches a
    loopback address under a foreign host name.
    """
    try:
        host = urlsplit(f"//{headers.get('Host', '')}").hostname
    except ValueError:
        return False
    return (
        is_loopback(host)
        and not any(map(ON_BEHALF.fullmatch, headers))
        # The page `/ui` may send GET: a browser adds no Origin to GET of the same origin.
        and all(site == OWN_PAGE for site in headers.getall(FROM, ()))
    )


def is_loopback(host: str | None) -> bool:
    """Return whether a host is this machine alone: `localhost` or a loopback address.

    An IPv4 address may be written as IPv6.
    """
    if host == "localhost":
        return True
    try:
        address = ip_address(host or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
