"""Cross-origin rules (CORS): which web pages may use the proxy from a browser. Pure.

The rules are those of vLLM's server for `--allowed-origins`, which uses starlette's
`CORSMiddleware`.
"""

from collections.abc import Container, Mapping

ANY = "*"
"""Wildcard for all origins."""

ALLOWED = "Access-Control-Allow-Origin"
"""Header without which a browser does not let a page use the proxy."""

ASKED = "Access-Control-Request-Method"
"""Header that makes an OPTIONS request a preflight."""

PREFLIGHT = {
    "Vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, "
    "Access-Control-Request-Private-Network",
    "Access-Control-Allow-Methods": "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
    "Access-Control-Max-Age": "600",
}
"""Headers of the answer to each preflight; a browser may keep it for 600 s."""


def response_headers(origins: Container[str], origin: str | None) -> dict[str, str]:
    """Return the headers of a response, for the request's `Origin` and the allowed ones.

    `Vary` makes caches separate the responses to different origins.
    """
    if origin is not None and ANY in origins:
        return {"Vary": "Origin", ALLOWED: ANY}
    return (
        {"Vary": "Origin", ALLOWED: origin} if origin in origins and origin else {"Vary": "Origin"}
    )


def preflight_headers(origins: Container[str], headers: Mapping[str, str]) -> dict[str, str] | None:
    """Return the headers of the answer to a preflight; None if the headers are not those of one."""
    origin = headers.get("Origin")
    if origin is None or ASKED not in headers:
        return None
    answer = response_headers(origins, origin) | PREFLIGHT
    asked = headers.get("Access-Control-Request-Headers", "")
    if asked and asked.isascii() and asked.isprintable():
        answer["Access-Control-Allow-Headers"] = asked
    return answer
