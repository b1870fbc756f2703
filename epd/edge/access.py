"""Access to routes: classes of access with their checks, and cross-origin rules (CORS). Pure.

The cross-origin rules are those of vLLM's server, which uses starlette's `CORSMiddleware`. Status,
headers and text of a rejection are the same here.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from enum import Enum
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from multidict import CIMultiDictProxy
from pydantic import SecretStr

from epd.config.sections.serving import CrossOriginSettings
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


ANY = "*"
"""Wildcard for all origins, methods or headers."""

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")

SAFELISTED = frozenset({"Accept", "Accept-Language", "Content-Language", "Content-Type"})
"""Request headers that a page may always set."""

MAX_AGE_S = 600
"""Time for which a browser may cache the answer to a preflight, in seconds."""

ASKED = "Access-Control-Request-Method"
"""Header that makes an OPTIONS request a preflight."""

VARY = (
    "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, "
    "Access-Control-Request-Private-Network"
)


class Preflight(NamedTuple):
    """Answer to a preflight: its headers, and the parts that are refused; none if it is allowed."""

    refused: tuple[str, ...]
    headers: Mapping[str, str]


class CrossOrigin:
    """Rules for the origins, methods and headers that web pages may use."""

    def __init__(self, settings: CrossOriginSettings) -> None:
        """Allow the values of the settings; `*` in one of them allows all of its kind."""
        methods, headers = settings.allowed_methods, settings.allowed_headers
        self._origins = frozenset(settings.allowed_origins)
        self._methods = METHODS if ANY in methods else methods
        self._all_headers = ANY in headers
        self._headers = sorted(SAFELISTED | set(headers))
        self._lower = frozenset(name.lower() for name in self._headers)
        allows = settings.allow_credentials
        self._credentials = {"Access-Control-Allow-Credentials": "true"} if allows else {}

    def preflight(self, headers: Mapping[str, str]) -> Preflight | None:
        """Return the answer to a preflight; None if the headers are not those of a preflight."""
        origin, method = headers.get("Origin"), headers.get(ASKED)
        if origin is None or method is None:
            return None
        asked = headers.get("Access-Control-Request-Headers")
        checks = {
            "origin": self._allows(origin),
            "method": method in self._methods,
            "headers": asked is None or self._takes(asked),
            "private-network": "Access-Control-Request-Private-Network" not in headers,
        }
        refused = tuple(name for name, fine in checks.items() if not fine)
        answer = {
            "Vary": VARY,
            "Access-Control-Allow-Methods": ", ".join(self._methods),
            "Access-Control-Max-Age": str(MAX_AGE_S),
            **self._credentials,
        }
        if checks["origin"]:
            answer["Access-Control-Allow-Origin"] = self._shown(origin)
        if not self._all_headers:
            answer["Access-Control-Allow-Headers"] = ", ".join(self._headers)
        elif asked is not None and checks["headers"]:
            answer["Access-Control-Allow-Headers"] = asked
        return Preflight(refused, answer)

    def response_headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers of every other response, for the request's `Origin`.

        `Vary` makes caches separate the responses to different origins.
        """
        if origin is None or not self._allows(origin):
            return {"Vary": "Origin"}
        own = {"Vary": "Origin", "Access-Control-Allow-Origin": self._shown(origin)}
        return own | self._credentials

    def _allows(self, origin: str) -> bool:
        return ANY in self._origins or origin in self._origins

    def _shown(self, origin: str) -> str:
        return ANY if ANY in self._origins else origin

    def _takes(self, asked: str) -> bool:
        # With all headers allowed, this value is copied into a header of the answer.
        if self._all_headers:
            return asked.isascii() and asked.isprintable()
        return all(name.strip().lower() in self._lower for name in asked.split(","))
