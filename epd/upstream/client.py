"""The HTTP client of all requests to instances."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Self

from epd.bodies.cuts import Pieces
from epd.errors import Overloaded, Stage, UpstreamFailed, UpstreamUnreachable
from epd.http.connection import Broken, Connection, Died, Unreachable
from epd.http.http1 import Target, request_head, target_of
from epd.http.pool import Pool
from epd.http.tls import upstream_context
from epd.upstream.faults import FAILURES, cause, shown
from epd.upstream.reply import Answer, Reply, is_success
from epd.version import __version__

KEEP_ALIVE_S = 2.0
"""Time for which an idle connection is pooled: under half of vLLM's
(`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`, 5 s), so that the proxy does not reuse one that vLLM has just
closed."""

OURS = f"User-Agent: epd/{__version__}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
"""Headers of every request."""


class Upstream:
    """Sends requests to instances over one connection pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def connect_within(self, timeout_s: float) -> None:
        """Change the timeout of a connect from now on."""
        self._pool.connect_timeout_s = timeout_s

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, connect_timeout_s: float, ca_file: Path | None = None
    ) -> AsyncIterator[Self]:
        """Return a client with a pool, which is closed at the exit.

        Raises:
            TlsInvalid: the file of CAs is invalid.
        """
        tls = upstream_context(ca_file)
        pool = Pool(tls, connect_timeout_s=connect_timeout_s, keep_alive_s=KEEP_ALIVE_S)
        try:
            yield cls(pool)
        finally:
            await pool.close()

    def verify_as(self, names: Mapping[str, str]) -> None:
        """Set the expected names in certificates, by base URL with an address as host."""
        self._pool.verify_as(names)

    async def open(
        self,
        url: str,
        *,
        stage: Stage,
        headers: Mapping[str, str],
        body: Pieces | None = None,
        head_timeout_s: float,
    ) -> Reply:
        """Send a request (POST with a body, GET without) and wait for the head of its answer.

        The caller closes the reply. If its body has not been read by then, this closes the
        connection, which tells the instance that the request is abandoned.

        Raises:
            UpstreamFailed: it could not be sent, or the connection broke.
            UpstreamTimeout: no head was received within `head_timeout_s` seconds.
        """
        until_s = asyncio.get_running_loop().time() + head_timeout_s
        request = _request(url, headers, body, stage)
        connection = await self._exchange(request, stage, until_s)
        release = partial(self._pool.give_back, request.target.origin, connection)
        return Reply(connection, stage, math.inf, f"{stage}_stalled", release)

    async def fetch(
        self,
        url: str,
        *,
        stage: Stage,
        headers: Mapping[str, str],
        body: Pieces | None = None,
        timeout_s: float,
    ) -> Answer:
        """Send a request and read the whole answer, with any status.

        Raises:
            UpstreamFailed: it could not be sent, the answer was cut off, or is too large.
            UpstreamTimeout: the answer was not complete within `timeout_s` seconds.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        request = _request(url, headers, body, stage)
        connection = await self._exchange(request, stage, until_s)
        release = partial(self._pool.give_back, request.target.origin, connection)
        with Reply(connection, stage, until_s, f"{stage}_timeout", release) as reply:
            return Answer(reply.status, reply.headers, await reply.read(idle_s=timeout_s))

    async def _exchange(self, request: "_Request", stage: Stage, until_s: float) -> Connection:
        """Send a request, and return its connection after the head of the answer.

        The request is sent a second time if only the end of an idle connection was at fault: an
        instance may close an idle connection at the moment of its reuse. Before any byte of an
        answer, this says nothing about the instance. If the instance then accepts no new
        connection, it died while it had the request.
        """
        origin = request.target.origin
        try:
            connection = self._pool.take(origin) or await self._pool.connect(origin, until_s)
            try:
                await connection.ask(request.head(), request.body or (), until_s)
            except BaseException as error:
                connection.abort()
                if not (isinstance(error, Broken) and connection.stale):
                    raise
                connection = await _ask_again(self._pool, request, until_s, error)
        except FAILURES as error:
            raise shown(error, stage, broken=f"{stage}_failed") from cause(error)
        if connection.headers.get("Content-Encoding", "identity").lower() != "identity":
            connection.abort()
            raise UpstreamFailed(
                f"the {stage} instance's answer has an unsupported encoding",
                slug=f"{stage}_bad_response",
                stage=stage,
            )
        return connection

    async def probe(self, url: str, *, timeout_s: float) -> bool:
        """Return whether a GET over a new connection is answered with 2xx.

        An open connection would not show whether the instance accepts new ones.

        Raises:
            Overloaded: the proxy has no file descriptor left.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        try:
            request = _request(url, {}, None, "proxy")
            connection = await _ask_anew(self._pool, request, until_s)
        except UpstreamUnreachable:
            return False
        except FAILURES as error:
            failure = shown(error, "proxy", broken="unreachable")
            if isinstance(failure, Overloaded):
                raise failure from error
            return False
        connection.abort()
        return is_success(connection.status)


class _Request:
    """A request and its destination."""

    __slots__ = ("_headers", "body", "target")

    def __init__(self, url: str, headers: Mapping[str, str], body: Pieces | None) -> None:
        self.target: Target = target_of(url)
        self.body = body
        self._headers = headers

    def head(self, more: str = "") -> bytes:
        """Return the head, with additional header lines."""
        length = None if self.body is None else sum(map(len, self.body))
        return request_head(self.target, self._headers, length, OURS + more)


def _request(url: str, headers: Mapping[str, str], body: Pieces | None, stage: Stage) -> _Request:
    try:
        return _Request(url, headers, body)
    except ValueError as error:
        raise UpstreamUnreachable(
            f"the URL of the {stage} instance is invalid", slug=f"{stage}_failed", stage=stage
        ) from error


async def _ask_again(pool: Pool, request: _Request, until_s: float, broken: Broken) -> Connection:
    """Send a request again after its idle connection was closed."""
    try:
        return await _ask_anew(pool, request, until_s)
    except Unreachable as error:
        if isinstance(broken, Died):
            raise Died from cause(error)
        raise


async def _ask_anew(pool: Pool, request: _Request, until_s: float) -> Connection:
    """Send a request over a new connection."""
    connection = await pool.connect(request.target.origin, until_s)
    connection.kept = False
    try:
        await connection.ask(request.head("Connection: close\r\n"), request.body or (), until_s)
    except BaseException:
        connection.abort()
        raise
    return connection
