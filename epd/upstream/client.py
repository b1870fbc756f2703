"""The one module that sends HTTP to instances."""

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
"""How long an idle connection is pooled: under half of what vLLM keeps one
(`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`, 5 s), so that none is reused that it has just closed."""

OURS = f"User-Agent: epd/{__version__}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
"""Headers of every request."""


class Upstream:
    """Requests to instances, over one connection pool."""

    def __init__(self, pool: Pool) -> None:
        """Send over its connections."""
        self._pool = pool

    def connect_within(self, timeout_s: float) -> None:
        """Have a connection made by then from now on, or not."""
        self._pool.connect_timeout_s = timeout_s

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
        pool = Pool(tls, connect_timeout_s=connect_timeout_s, keep_alive_s=KEEP_ALIVE_S)
        try:
            yield cls(pool)
        finally:
            await pool.close()

    def verify_as(self, names: Mapping[str, str]) -> None:
        """Whose certificates instances have to show, by base URLs that have addresses as hosts."""
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

        The reply has to be closed. If its body was not read by then, this closes the connection,
        which is how an instance learns that the request was abandoned.

        Raises:
            UpstreamFailed: it could not be sent, or the connection broke.
            UpstreamTimeout: no head came within `head_timeout_s` seconds.
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
        """Send a request and read the whole answer, whatever its status.

        Raises:
            UpstreamFailed: it could not be sent, broke off, or is too large.
            UpstreamTimeout: it was not there within `timeout_s` seconds.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        request = _request(url, headers, body, stage)
        connection = await self._exchange(request, stage, until_s)
        release = partial(self._pool.give_back, request.target.origin, connection)
        with Reply(connection, stage, until_s, f"{stage}_timeout", release) as reply:
            return Answer(reply.status, reply.headers, await reply.read(idle_s=timeout_s))

    async def _exchange(self, request: "_Request", stage: Stage, until_s: float) -> Connection:
        """Send a request, and return its connection once the head of the answer has come.

        The request is sent once more where only an idle connection's end was at fault. An instance
        may close an idle connection at the moment it is used again. Before it has answered
        anything, this alone says nothing about the instance. If the instance then accepts no new
        connection, it died, and it had the request.
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
                f"the {stage} instance's answer has an encoding that was not asked for",
                slug=f"{stage}_bad_response",
                stage=stage,
            )
        return connection

    async def probe(self, url: str, *, timeout_s: float) -> bool:
        """Whether a GET is answered with 2xx, over a connection of its own.

        One that is open already says nothing of whether a new one would be accepted.

        Raises:
            Overloaded: there is no descriptor left to find out with.
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
    """What is sent, and where."""

    __slots__ = ("_headers", "body", "target")

    def __init__(self, url: str, headers: Mapping[str, str], body: Pieces | None) -> None:
        self.target: Target = target_of(url)
        self.body = body
        self._headers = headers

    def head(self, more: str = "") -> bytes:
        """Its head, with more lines of headers than it has itself."""
        length = None if self.body is None else sum(map(len, self.body))
        return request_head(self.target, self._headers, length, OURS + more)


def _request(url: str, headers: Mapping[str, str], body: Pieces | None, stage: Stage) -> _Request:
    try:
        return _Request(url, headers, body)
    except ValueError as error:
        raise UpstreamUnreachable(
            f"the URL of the {stage} instance is not valid", slug=f"{stage}_failed", stage=stage
        ) from error


async def _ask_again(pool: Pool, request: _Request, until_s: float, broken: Broken) -> Connection:
    """Send a request anew whose connection was closed while it was idle."""
    try:
        return await _ask_anew(pool, request, until_s)
    except Unreachable as error:
        if isinstance(broken, Died):
            raise Died from cause(error)
        raise


async def _ask_anew(pool: Pool, request: _Request, until_s: float) -> Connection:
    """Send a request over a connection of its own."""
    connection = await pool.connect(request.target.origin, until_s)
    connection.kept = False
    try:
        await connection.ask(request.head("Connection: close\r\n"), request.body or (), until_s)
    except BaseException:
        connection.abort()
        raise
    return connection
