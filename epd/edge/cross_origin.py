"""Cross-origin rules (CORS): which web pages may use the proxy from a browser. Pure.

The rules are those of vLLM's server, which uses starlette's `CORSMiddleware`. Status, headers and
text of a rejection are the same here.
"""

from collections.abc import Mapping
from typing import NamedTuple

from epd.config.sections.serving import CrossOriginSettings

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
