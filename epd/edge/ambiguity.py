"""Checks for requests that aiohttp's parser accepts and another parser may read differently."""

import re

from aiohttp import HttpVersion10, HttpVersion11, hdrs, web

from epd.errors import BadRequest, ProxyError, RequestRefused

MAX_CONTENT_LENGTH = 2**63 - 1
"""Upper bound of `Content-Length`. llhttp reads 2**64 - 1 as no length, and then parses the body as
the next request."""

ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)
"""Absolute form of a request target, which names its host (RFC 9112, 3.2.2)."""


def refusal(request: web.BaseRequest) -> ProxyError | None:
    """Return the error of a request that no route may serve; None if it is valid."""
    if _is_ambiguous(request):
        return invalid("the request's length or version is ambiguous")
    if _is_elsewhere(request):
        return invalid("the request's target names another host than its Host header")
    if hdrs.EXPECT in request.headers and any(
        it and it.lower() != "100-continue" for it in request.headers.getall(hdrs.EXPECT)
    ):
        return RequestRefused(
            417, "the only supported expectation is 100-continue", slug="unsupported_expectation"
        )
    return None


def _is_elsewhere(request: web.BaseRequest) -> bool:
    """Return whether target and `Host` name different hosts.

    aiohttp uses the target's host, so such a request would pass a check of `Host`.
    """
    target = ABSOLUTE.match(request.raw_path)
    return target is not None and target[1].lower() != request.headers.get(hdrs.HOST, "").lower()


def _is_ambiguous(request: web.BaseRequest) -> bool:
    """Return whether another HTTP parser may see other requests in these bytes (smuggling)."""
    if request.version < HttpVersion10 or (request.content_length or 0) > MAX_CONTENT_LENGTH:
        return True
    codings = request.headers.getall(hdrs.TRANSFER_ENCODING, ())
    return bool(codings) and (
        request.version < HttpVersion11 or any(coding.lower() != "chunked" for coding in codings)
    )


def invalid(message: str) -> BadRequest:
    """Return the error for a request that is not valid HTTP or may be read as two requests."""
    return BadRequest(message, slug="invalid_http")
