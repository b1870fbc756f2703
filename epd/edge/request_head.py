"""Checks of request heads, the path prefix of a reverse proxy, and the limit of open files.

Rejected heads are those that aiohttp's parser accepts and another parser may read differently. The
limit of open files and sockets (descriptors) bounds the client connections.
"""

import re
import resource

from aiohttp import HttpVersion10, HttpVersion11, hdrs, web
from aiohttp.http_parser import RawRequestMessage

from epd.errors import BadRequest, ProxyError, RequestRefused

MAX_CONTENT_LENGTH = 2**63 - 1
"""Upper bound of `Content-Length`. llhttp reads 2**64 - 1 as no length, and then parses the body as
the next request."""

MAX_HEAD_BYTES = 256 * 1024
"""Maximum size of a request's head (its target and all headers), in bytes."""

MAX_HEADERS = 256
"""Upper bound of the headers of a request, as in vLLM's server (`--h11-max-header-count`)."""

NAME = re.compile(rb"[A-Za-z0-9-]{1,64}")
"""Names of headers that an error may quote."""

END_OF_HEAD = b"\r\n\r\n"

ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)
"""Absolute form of a request target, which names its host (RFC 9112, 3.2.2)."""


def find_refusal(request: web.BaseRequest) -> ProxyError | None:
    """Return the error of a request that no route may serve; None if it is valid."""
    if _is_ambiguous(request):
        return invalid("the request's length or version is ambiguous")
    if _hosts_differ(request):
        return invalid("the request's target names another host than its Host header")
    expected = request.headers.getall(hdrs.EXPECT, ())
    if any(value and value.lower() != "100-continue" for value in expected):
        return RequestRefused(
            417, "the only supported expectation is 100-continue", slug="unsupported_expectation"
        )
    return None


def _hosts_differ(request: web.BaseRequest) -> bool:
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


def head_size(received: bytes | bytearray) -> int:
    """Return the size of the head that these bytes begin with; all of them without its end."""
    head = received.lstrip(b"\r\n")
    end = head.find(END_OF_HEAD)
    return len(head) if end < 0 else end


def too_large(received: bytes | bytearray) -> RequestRefused:
    """Return the error for a head above the limit. It names the largest line."""
    first, *lines = received.split(b"\r\n")
    largest = max(lines, key=len, default=b"")
    name = largest.partition(b":")[0]
    culprit = "the header " + name.decode() if NAME.fullmatch(name) else "a header"
    if len(first) >= len(largest):
        culprit = "the request line"
    return RequestRefused(
        431,
        f"the head is larger than {MAX_HEAD_BYTES} bytes; {culprit} is its largest part",
        slug="head_too_large",
    )


def too_many() -> RequestRefused:
    """Return the error for a request with too many headers."""
    return RequestRefused(
        431, f"the request has more than {MAX_HEADERS} headers", slug="head_too_large"
    )


def without_prefix(message: RawRequestMessage, prefix: str) -> RawRequestMessage:
    """Return a request's head with the prefix removed from its path.

    A path without the prefix is unchanged: a reverse proxy may have removed it already. As in
    vLLM's server (starlette's `root_path`), both forms are answered. The prefix has a leading slash
    and no trailing one, such as `/vllm`.
    """
    path = message.url.raw_path
    if path != prefix and not path.startswith(f"{prefix}/"):
        return message
    rest = path[len(prefix) :] or "/"
    url = message.url.with_path(rest, encoded=True, keep_query=True, keep_fragment=True)
    return message._replace(url=url)


RESERVED = 64
"""Descriptors for other uses than connections: listeners, logs, the event loop, the store."""
PER_CLIENT = 3
"""Descriptors per client: its own connection, and two to instances. Most requests have one upstream
connection at a time, and idle ones are kept open. A request with many items has more
(`encoding.AT_ONCE`) while they are encoded."""


def client_connections() -> int:
    """Return how many clients may be connected so that each has `PER_CLIENT` descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - RESERVED) // PER_CLIENT)
