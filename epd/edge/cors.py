"""Which requests of web pages a browser lets through (CORS), by the rules of vLLM's server. Pure.

vLLM has starlette's `CORSMiddleware`. Status, headers and the text of a refusal are the same here.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

ANY = "*"
"""Stands for every origin, method or header."""

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")

SAFELISTED = frozenset({"Accept", "Accept-Language", "Content-Language", "Content-Type"})
"""Headers that a page may always set."""

MAX_AGE_S = 600
"""How long a browser may keep the answer to a preflight, in seconds."""

ASKED = "Access-Control-Request-Method"
"""Header by which an OPTIONS request is a preflight."""

VARY = (
    "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, "
    "Access-Control-Request-Private-Network"
)


class Preflight(NamedTuple):
    """The answer to a preflight.

    Attributes:
        refused: what the request has that is not allowed; empty where the browser may go on.
        headers: of the answer, whether refused or not.
    """

    refused: tuple[str, ...]
    headers: Mapping[str, str]


class CrossOrigin:
    """Origins, methods and headers that web pages may use."""

    def __init__(
        self,
        origins: Collection[str],
        methods: Collection[str],
        headers: Collection[str],
        *,
        credentials: bool,
    ) -> None:
        """Allow these; `*` in a list is all of its kind.

        Args:
            origins: as browsers write them, such as `https://chat.example.com`.
            methods: HTTP methods.
            headers: names of request headers, beside `SAFELISTED`.
            credentials: whether a page may have cookies and client certificates sent along.
        """
        self._origins = frozenset(origins)
        self._methods = METHODS if ANY in methods else tuple(methods)
        self._all_headers = ANY in headers
        self._headers = sorted(SAFELISTED | set(headers))
        self._lower = frozenset(name.lower() for name in self._headers)
        self._credentials = {"Access-Control-Allow-Credentials": "true"} if credentials else {}

    def preflight(self, headers: Mapping[str, str]) -> Preflight | None:
        """Answer a preflight; None: an OPTIONS request with these headers is not a preflight."""
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

    def answer(self, origin: str | None) -> dict[str, str]:
        """Headers of every other answer, by the request's `Origin`.

        A cache keeps the answers to different origins apart (`Vary`).
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
        # What is mirrored becomes a header of the answer.
        if self._all_headers:
            return asked.isascii() and asked.isprintable()
        return all(name.strip().lower() in self._lower for name in asked.split(","))
