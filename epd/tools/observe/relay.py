"""Relay in front of vLLM servers: every request goes on, and its answer comes back, unchanged."""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import hdrs, web
from multidict import CIMultiDict
from pydantic import SecretStr
from yarl import URL

from epd.edge.access import check_admin, is_loopback
from epd.errors import BadRequest, ProxyError, UpstreamUnreachable
from epd.tools.observe.counting import Counter, Observed
from epd.tools.observe.report import ObserveReport, Relayed, as_markdown, make_report

HOP_BY_HOP = frozenset(
    name.lower()
    for name in (
        hdrs.CONNECTION,
        hdrs.EXPECT,  # the relay has answered it
        "Keep-Alive",
        hdrs.PROXY_AUTHENTICATE,
        hdrs.PROXY_AUTHORIZATION,
        "Proxy-Connection",
        hdrs.TE,
        hdrs.TRAILER,
        hdrs.TRANSFER_ENCODING,
        hdrs.UPGRADE,
    )
)
"""Headers of one connection, which no proxy passes on (RFC 9110, section 7.6.1)."""

ADDED = (hdrs.CONTENT_TYPE, hdrs.DATE, hdrs.SERVER)
"""Headers that aiohttp adds to an answer without them."""

ANSWER_BYTES = 2048
"""Bytes at the end of an answer that have its usage."""

OWN = frozenset({"/observe", "/observe.json"})
"""Paths that the relay answers itself. vLLM has none of them."""


@dataclass(slots=True)
class Server:
    """A vLLM server, and the number of its requests in progress."""

    url: str
    in_progress: int = 0

    def url_of(self, request: web.Request) -> URL:
        """Return the URL of a request at this server, with its path and query as they are."""
        return URL(self.url + request.raw_path, encoded=True)


@dataclass(slots=True)
class Relay:
    """Relay of requests to the server with the fewest in progress.

    Attributes:
        counter: counter of the media in the requests.
        max_body_bytes: size up to which a body is read whole and counted. A larger one is forwarded
            as it arrives.
        private: whether only this machine can connect, so that reports need no key.
        encode_ms: milliseconds of an encode of one megapixel; None if the user states none.
    """

    servers: Sequence[Server]
    counter: Counter
    session: aiohttp.ClientSession
    max_body_bytes: int
    admin_key: SecretStr | None = None
    private: bool = False
    encode_ms: float | None = None
    started_s: float = field(default_factory=time.monotonic)
    requests: int = 0
    failed: int = 0
    too_large: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request: with the report, or with a server's answer."""
        if request.path in OWN:
            return await self._report_response(request)
        if not request.raw_path.startswith("/"):
            return _error_response(
                BadRequest("the request line must have a path", slug="invalid_http")
            )
        self.requests += 1
        index = self._least_busy()
        server = self.servers[index]
        server.in_progress += 1
        try:
            return await self._relay(request, server, index)
        except (aiohttp.ClientError, TimeoutError):
            self.failed += 1
            error = UpstreamUnreachable("the vLLM server did not answer", stage="decode")
            return _error_response(error)
        finally:
            server.in_progress -= 1

    def _least_busy(self) -> int:
        """Return the index of a server with the fewest requests in progress, in turn."""
        number = len(self.servers)
        rotated = [(self.requests + offset) % number for offset in range(number)]
        return min(rotated, key=lambda index: self.servers[index].in_progress)

    async def report(self) -> ObserveReport:
        """Return the report so far, made in a thread: it waits for the counter's lock."""
        return await asyncio.to_thread(self._make_report)

    def _make_report(self) -> ObserveReport:
        relayed = Relayed(
            time.monotonic() - self.started_s,
            self.requests,
            self.failed,
            self.too_large,
            self.counter.dropped,
            len(self.servers),
            self.encode_ms,
        )
        with self.counter.lock:
            return make_report(self.counter.traffic, relayed)

    async def _relay(self, request: web.Request, server: Server, index: int) -> web.StreamResponse:
        body, rest = await self._read(request)
        self.too_large += rest is not None
        answer = b""
        try:
            async with self.session.request(
                request.method,
                server.url_of(request),
                headers=_passed_on(request.headers),
                skip_auto_headers=(
                    hdrs.USER_AGENT,
                    hdrs.ACCEPT,
                    hdrs.ACCEPT_ENCODING,
                    hdrs.CONTENT_TYPE,
                ),
                data=rest if rest is not None else io.BytesIO(body) if body else None,
                allow_redirects=False,
            ) as reply:
                response = RelayedResponse(
                    status=reply.status, reason=reply.reason, headers=_passed_on(reply.headers)
                )
                response.absent = [name for name in ADDED if name not in reply.headers]
                await response.prepare(request)
                try:
                    async for chunk in reply.content.iter_any():
                        answer = (answer + chunk[-ANSWER_BYTES:])[-ANSWER_BYTES:]
                        await response.write(chunk)
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                    self.failed += 1
                    if request.transport is not None:  # the answer must not look complete
                        request.transport.abort()
                    return response
                await response.write_eof()
                return response
        finally:
            if body:
                content_type = request.headers.get(hdrs.CONTENT_TYPE, "")
                self.counter.offer(Observed(request.path, content_type, body, index, answer))

    async def _read(self, request: web.Request) -> tuple[bytes, AsyncIterator[bytes] | None]:
        """Return a body; or, if it is too large to be counted, an iterator over its chunks."""
        if (request.content_length or 0) > self.max_body_bytes:
            return b"", request.content.iter_any()
        parts, size = list[bytes](), 0
        while chunk := await request.content.readany():
            parts.append(chunk)
            size += len(chunk)
            if size > self.max_body_bytes:
                return b"", _continued(parts, request)
        return b"".join(parts), None

    async def _report_response(self, request: web.Request) -> web.Response:
        peer = request.get_extra_info("peername")
        private = self.private and isinstance(peer, tuple) and is_loopback(peer[0])
        try:
            check_admin(self.admin_key, request.headers, private=private)
        except ProxyError as error:
            return _error_response(error)
        report = await self.report()
        if request.path == "/observe.json":
            content = orjson.dumps(report, option=orjson.OPT_INDENT_2)
            return web.Response(body=content, content_type="application/json")
        return web.Response(text=as_markdown(report))


def _passed_on(headers: Any) -> CIMultiDict[str]:
    """Return the headers that belong to the request or the answer, and not to the connection."""
    named = {
        name.strip().lower()
        for value in headers.getall(hdrs.CONNECTION, ())
        for name in value.split(",")
    }
    dropped = HOP_BY_HOP | named
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in dropped
    )


async def _continued(parts: Sequence[bytes], request: web.Request) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    async for chunk in request.content.iter_any():
        yield chunk


def _error_response(error: ProxyError) -> web.Response:
    return web.Response(status=error.status, body=error.body(), content_type="application/json")


class RelayedResponse(web.StreamResponse):
    """Answer of a server.

    Attributes:
        absent: headers that it does not have.
    """

    absent: Sequence[str] = ()


async def drop_added_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Remove the headers that aiohttp has added to the answer of a server."""
    if isinstance(response, RelayedResponse):
        for name in response.absent:
            response.headers.pop(name, None)
