"""The one module that sends HTTP to instances."""

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import aiohttp

from epd.cuts import Pieces
from epd.errors import Overloaded, Stage, UpstreamFailed, UpstreamTimeout, UpstreamUnreachable
from epd.tls import upstream_context
from epd.version import __version__

KEEP_ALIVE_S = 2.0
"""How long an idle connection is pooled: under half of what vLLM keeps one
(`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`, 5 s), so that none is reused that it has just closed."""

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
WRITE_BYTES = 256 * 1024
MAX_ANSWER_BYTES = 16 * 1024**2
"""Largest answer of an encode or prefill instance, and largest error."""


def is_success(status: int) -> bool:
    """Whether a status is a 2xx."""
    return HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of an instance."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is a 2xx."""
        return is_success(self.status)


class Reply:
    """An answer whose head has come and whose body has not been read."""

    def __init__(self, response: aiohttp.ClientResponse, stage: Stage) -> None:
        self._response = response
        self._stage: Stage = stage

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._response.status

    @property
    def ok(self) -> bool:
        """Whether the status is a 2xx."""
        return is_success(self.status)

    @property
    def headers(self) -> Mapping[str, str]:
        """Response headers, by name in any case."""
        return self._response.headers

    async def read(self, *, idle_s: float | None = None, limit: int = MAX_ANSWER_BYTES) -> bytes:
        """The whole body.

        Raises:
            UpstreamFailed: it is larger than `limit` bytes, or broke off.
            UpstreamTimeout: nothing came for `idle_s` seconds.
        """
        parts = []
        size = 0
        async for chunk in self.chunks(idle_s):
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise UpstreamFailed(
                    f"the {self._stage} instance's answer is larger than {limit} bytes",
                    slug=f"{self._stage}_bad_response",
                    stage=self._stage,
                )
        return b"".join(parts)

    async def chunks(self, idle_s: float | None) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            UpstreamFailed: it broke off.
            UpstreamTimeout: nothing came for `idle_s` seconds.
        """
        content = self._response.content
        while True:
            with _translated(
                self._stage, broken=f"{self._stage}_died", late=f"{self._stage}_stalled"
            ):
                async with asyncio.timeout(idle_s):
                    chunk = await content.readany()
            if not chunk:
                return
            yield chunk


@dataclass(slots=True)
class _Sending:
    """One attempt to send a request.

    Attributes:
        reused: whether it went out on a connection that had been idle.
    """

    reused: bool = False


class Upstream:
    """Requests to instances, over one connection pool."""

    def __init__(self, pooled: aiohttp.ClientSession, fresh: aiohttp.ClientSession) -> None:
        """Send over `pooled`, and over `fresh`, which keeps no connection, where that fails."""
        self._pooled = pooled
        self._fresh = fresh

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, connect_timeout_s: float, ca_file: Path | None = None
    ) -> AsyncIterator[Self]:
        """A pool that is closed when the context is left.

        Raises:
            TlsInvalid: the file of CAs cannot be used.
        """
        tls = upstream_context(ca_file)
        connectors = (
            aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=tls),
            aiohttp.TCPConnector(limit=0, force_close=True, ssl=tls),
        )
        pooled, fresh = (
            aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": f"epd/{__version__}", "Accept-Encoding": "identity"},
                trace_configs=[_noting_reuse()],
            )
            for connector in connectors
        )
        async with pooled, fresh:
            yield cls(pooled, fresh)

    @asynccontextmanager
    async def open(
        self,
        url: str,
        *,
        stage: Stage,
        headers: Mapping[str, str],
        body: Pieces | None = None,
        head_timeout_s: float,
    ) -> AsyncIterator[Reply]:
        """Send a request (POST with a body, GET without) and wait for the answer's head.

        Leaving the context before the body was read closes the connection, which is how an
        instance learns that nobody waits any more.

        Raises:
            UpstreamFailed: it could not be sent, or the connection broke.
            UpstreamTimeout: no head came within `head_timeout_s` seconds.
        """
        with _translated(stage, broken=f"{stage}_failed"):
            async with asyncio.timeout(head_timeout_s):
                response = await self._send(url, headers, body)
        async with response:
            with _told_of_the_end(response):
                yield Reply(response, stage)

    async def _send(
        self, url: str, headers: Mapping[str, str], body: Pieces | None
    ) -> aiohttp.ClientResponse:
        """Send a request, and once more where only an idle connection's end was at fault.

        An instance may close an idle connection at the moment it is used again. Before it has
        answered anything, this alone says nothing about the instance.
        """
        sending = _Sending()
        try:
            return await _request(self._pooled, url, headers, body, sending)
        except aiohttp.ServerDisconnectedError as error:
            # The message is a text where no byte of an answer has come.
            if not sending.reused or not isinstance(error.message, str):
                raise
        except aiohttp.ClientOSError:
            if not sending.reused:
                raise
        return await _request(self._fresh, url, headers, body, _Sending())

    async def fetch(
        self,
        url: str,
        *,
        stage: Stage,
        headers: Mapping[str, str],
        body: Pieces | None = None,
        timeout_s: float,
    ) -> Answer:
        """Send a request and read the whole answer, whatever its status.

        Raises:
            UpstreamFailed: it could not be sent, broke off, or is too large.
            UpstreamTimeout: it was not there within `timeout_s` seconds.
        """
        with _translated(stage, broken=f"{stage}_failed"):
            async with (
                asyncio.timeout(timeout_s),
                self.open(
                    url, stage=stage, headers=headers, body=body, head_timeout_s=timeout_s
                ) as reply,
            ):
                return Answer(reply.status, reply.headers, await reply.read())

    async def probe(self, url: str, *, timeout_s: float) -> bool:
        """Whether a GET is answered with 2xx, over a connection of its own.

        One that is open already says nothing of whether a new one would be accepted.

        Raises:
            Overloaded: there is no descriptor left to find out with.
        """
        try:
            with _translated("proxy", broken="unreachable"):
                async with (
                    asyncio.timeout(timeout_s),
                    await _request(self._fresh, url, {}, None, _Sending()) as response,
                ):
                    return is_success(response.status)
        except (UpstreamFailed, UpstreamTimeout):
            return False


async def _request(
    session: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    body: Pieces | None,
    sending: _Sending,
) -> aiohttp.ClientResponse:
    return await session.request(
        "GET" if body is None else "POST",
        url,
        data=None if body is None else _sent(body),
        headers=headers if body is None else {**headers, "Content-Length": str(_length(body))},
        allow_redirects=False,
        trace_request_ctx=sending,
    )


def _sent(body: Pieces) -> BytesIO | AsyncIterator[bytes | memoryview]:
    """A body as aiohttp sends it piece by piece; bytes would be one write."""
    return BytesIO(body[0]) if len(body) == 1 else _written(body)


async def _written(body: Pieces) -> AsyncIterator[bytes | memoryview]:
    for piece in body:
        for start in range(0, len(piece), WRITE_BYTES):
            yield piece[start : start + WRITE_BYTES]


def _length(body: Pieces) -> int:
    return sum(map(len, body))


@contextmanager
def _told_of_the_end(response: aiohttp.ClientResponse) -> Iterator[None]:
    """Have whoever reads the body told when its connection is closed.

    aiohttp closes it where a chunk is malformed, and then its C parser leaves the reader waiting.
    """
    content = response.content

    def tell(_: object = None) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection was closed"))

    protocol = None if response.connection is None else response.connection.protocol
    closed = None if protocol is None else protocol.closed
    if closed is None:  # it has ended by now, or this answer has
        tell()
        yield
        return
    closed.remove_done_callback(_seen)  # once for a connection, however many answers it brings
    closed.add_done_callback(_seen)
    closed.add_done_callback(tell)
    try:
        yield
    finally:
        closed.remove_done_callback(tell)


def _seen(closed: asyncio.Future[None]) -> None:
    """Take note of a connection's error: asyncio logs those that nobody asks for."""
    if not closed.cancelled():
        closed.exception()


def _noting_reuse() -> aiohttp.TraceConfig:
    trace = aiohttp.TraceConfig()

    async def reused(_: aiohttp.ClientSession, traced: SimpleNamespace, __: object) -> None:
        traced.trace_request_ctx.reused = True

    trace.on_connection_reuseconn.append(reused)
    return trace


@contextmanager
def _translated(stage: Stage, *, broken: str, late: str | None = None) -> Iterator[None]:
    """Turn aiohttp's errors into ours.

    Addresses and library texts stay in the cause, which is logged and not shown.
    """
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise UpstreamUnreachable(
            f"the {stage} instance cannot be reached", slug=broken, stage=stage
        ) from error
    except TimeoutError as error:
        raise UpstreamTimeout(
            f"the {stage} instance did not answer in time",
            slug=late or f"{stage}_timeout",
            stage=stage,
        ) from error
    except aiohttp.ClientConnectorError as error:
        if error.errno in OUT_OF_DESCRIPTORS:  # ours, not the instance's
            raise Overloaded("too many connections are open", stage=stage) from error
        raise UpstreamUnreachable(
            f"the {stage} instance cannot be reached", slug=broken, stage=stage
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamFailed(
            f"the connection to the {stage} instance broke", slug=broken, stage=stage
        ) from error
