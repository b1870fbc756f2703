"""Reading of a request's body, within the limits of size, rate and time."""

import asyncio
from collections.abc import Callable

from aiohttp import HttpVersion11, hdrs, web

from epd.config import ProxyConfig
from epd.errors import RequestRefused
from epd.media.held import max_body_bytes

GRACE_S = 5.0
"""Seconds before the minimum rate of a body applies: clients may create the body while they send.
"""


Grown = Callable[[int], None]
"""Function called with the number of bytes received so far. An exception of it ends the reading."""


async def read_body(request: web.Request, config: ProxyConfig, grown: Grown) -> bytes | bytearray:
    """Return the whole body of a request.

    Raises:
        RequestRefused: the body is encoded (415), too large (413) or too slow (408).
    """
    # A few compressed bytes may unpack into any number, and images are compressed already.
    encoding = request.headers.get(hdrs.CONTENT_ENCODING)
    if encoding is not None and encoding.lower() != "identity":
        raise RequestRefused(
            415, "the body must have no Content-Encoding", slug="unsupported_encoding"
        )
    limit = max_body_bytes(config)
    if request.content.is_eof():  # the body arrived with the head
        body = request.content.read_nowait()
        _count(len(body), limit, grown)
        return body
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    await _ask_for(request)
    try:
        return await _collect(request, config, grown)
    except TimeoutError:
        raise RequestRefused(408, "the body did not arrive in time", slug="body_timeout") from None


async def _collect(request: web.Request, config: ProxyConfig, grown: Grown) -> bytes | bytearray:
    started, limit = asyncio.get_running_loop().time(), max_body_bytes(config)
    latest = started + config.body_timeout_s
    content = request.content
    # Joining what has arrived costs a copy. Without a length, parts may be of one byte each.
    sized = request.content_length is not None
    parts = bytearray()  # a list of one-byte parts would need 40 times the memory
    async with asyncio.timeout_at(min(latest, started + GRACE_S)) as deadline:
        while chunk := (await content.readchunk())[0] if sized else await content.readany():
            parts += chunk
            _count(len(parts), limit, grown)
            rate_s = len(parts) / config.body_min_rate_bytes
            deadline.reschedule(min(latest, started + GRACE_S + rate_s))
    return parts


def _count(size: int, limit: int, grown: Grown) -> None:
    if size > limit:
        raise too_large(limit)
    grown(size)


async def _ask_for(request: web.Request) -> None:
    """Send `100 Continue` to a client that waits for it, once the request has passed all checks."""
    expected = request.headers.get(hdrs.EXPECT, "").lower()
    if expected == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # it is not part of the response


def too_large(limit: int) -> RequestRefused:
    """Return the error for a body of more than `limit` bytes."""
    return RequestRefused(413, f"the body is larger than {limit} bytes", slug="body_too_large")
