"""Requests that aiohttp's parser lets through, and that another parser may read differently."""

import re

from aiohttp import HttpVersion10, HttpVersion11, hdrs, web

from epd.errors import BadRequest, ProxyError, RequestRefused

MAX_CONTENT_LENGTH = 2**63 - 1
"""llhttp takes 2**64 - 1 for no length at all, and so a body for the next request."""

ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)
"""A request target that names its host (RFC 9112, 3.2.2)."""


def refusal(request: web.BaseRequest) -> ProxyError | None:
    """What is wrong with a request, whichever route it is for."""
    if _is_ambiguous(request):
        return invalid("the request's length or version is ambiguous")
    if _is_elsewhere(request):
        return invalid("the request's target is on another host than its Host says")
    if hdrs.EXPECT in request.headers and any(
        it and it.lower() != "100-continue" for it in request.headers.getall(hdrs.EXPECT)
    ):
        return RequestRefused(
            417, "nothing can be expected but 100-continue", slug="unsupported_expectation"
        )
    return None


def _is_elsewhere(request: web.BaseRequest) -> bool:
    """Whether it names two hosts. aiohttp goes by its target; a check of `Host` would be passed."""
    target = ABSOLUTE.match(request.raw_path)
    return target is not None and target[1].lower() != request.headers.get(hdrs.HOST, "").lower()


def _is_ambiguous(request: web.BaseRequest) -> bool:
    """Whether another HTTP parser may see other requests in the same bytes (request smuggling)."""
    if request.version < HttpVersion10 or (request.content_length or 0) > MAX_CONTENT_LENGTH:
        return True
    codings = request.headers.getall(hdrs.TRANSFER_ENCODING, ())
    return bool(codings) and (
        request.version < HttpVersion11 or any(coding.lower() != "chunked" for coding in codings)
    )


def invalid(message: str) -> BadRequest:
    """What a client is told whose request is no HTTP, or may be two."""
    return BadRequest(message, slug="invalid_http")
