"""The one module that sends HTTP to instances."""

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from epd.bodies.cuts import Pieces
from epd.errors import Overloaded, Stage, UpstreamFailed
from epd.http.connection import Broken, Connection
from epd.http.faults import FAILURES, cause, shown
from epd.http.http1 import Target, request_head, target_of
from epd.http.pool import Pool
from epd.http.reply import Answer, Reply, is_success
from epd.http.tls import upstream_context
from epd.version import __version__

KEEP_ALIVE_S = 2.0
"""How long an idle connection is pooled: under half of what vLLM keeps one
(`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`, 5 s), so that none is reused that it has just closed."""

OURS = {"User-Agent": f"epd/{__version__}", "Accept": "*/*", "Accept-Encoding": "identity"}
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
        pool = Pool(
            ssl.create_default_context() if tls is True else tls,
            connect_timeout_s=connect_timeout_s,
            keep_alive_s=KEEP_ALIVE_S,
        )
        try:
            yield cls(pool)
        finally:
            await pool.close()

    def verify_as(self, names: Mapping[str, str]) -> None:
        """Whose certificates instances have to show, by base URLs that have addresses as hosts."""
        self._pool.verify_as(names)

    def open(
        self,
        url: str,
        *,
        stage: Stage,
        headers: Mapping[str, str],
        body: Pieces | None = None,
        head_timeout_s: float,
    ) -> "Exchange":
        """Send a request (POST with a body, GET without) and wait for the answer's head.

        Leaving the context before the body was read closes the connection, which is how an
        instance learns that nobody waits any more.

        Raises:
            UpstreamFailed: it could not be sent, or the connection broke.
            UpstreamTimeout: no head came within `head_timeout_s` seconds.
        """
        return Exchange(self._pool, _Request(url, headers, body), stage, head_timeout_s)

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
        request = _Request(url, headers, body)
        async with Exchange(self._pool, request, stage, timeout_s, whole=True) as reply:
            return Answer(reply.status, reply.headers, await reply.read(idle_s=timeout_s))

    async def probe(self, url: str, *, timeout_s: float) -> bool:
        """Whether a GET is answered with 2xx, over a connection of its own.

        One that is open already says nothing of whether a new one would be accepted.

        Raises:
            Overloaded: there is no descriptor left to find out with.
        """
        request = _Request(url, {}, None)
        until_s = asyncio.get_running_loop().time() + timeout_s
        try:
            connection = await _ask_anew(self._pool, request, until_s)
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

    def head(self, **more: str) -> bytes:
        """Its head."""
        length = None if self.body is None else sum(map(len, self.body))
        return request_head(self.target, {**OURS, **self._headers, **more}, length)


class Exchange:
    """A request and its answer: a context that is entered when the answer's head has come."""

    __slots__ = ("_connection", "_pool", "_request", "_stage", "_timeout_s", "_whole")

    def __init__(
        self, pool: Pool, request: _Request, stage: Stage, timeout_s: float, *, whole: bool = False
    ) -> None:
        """Not begun. With `whole`, the body too has to be there in time."""
        self._pool = pool
        self._request = request
        self._stage: Stage = stage
        self._timeout_s = timeout_s
        self._whole = whole
        self._connection: Connection

    async def __aenter__(self) -> Reply:
        """Send the request and wait for the answer's head."""
        stage = self._stage
        until_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            self._connection = await _ask(self._pool, self._request, until_s)
        except FAILURES as error:
            raise shown(error, stage, broken=f"{stage}_failed") from cause(error)
        if self._connection.headers.get("Content-Encoding", "identity").lower() != "identity":
            self._connection.abort()
            raise UpstreamFailed(
                f"the {stage} instance's answer has an encoding that was not asked for",
                slug=f"{stage}_bad_response",
                stage=stage,
            )
        if self._whole:
            return Reply(self._connection, stage, until_s, late=f"{stage}_timeout")
        return Reply(self._connection, stage, math.inf, late=f"{stage}_stalled")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Keep the connection where the answer is complete, else end it."""
        self._pool.give_back(self._request.target.origin, self._connection)


async def _ask(pool: Pool, request: _Request, until_s: float) -> Connection:
    """Send a request, and once more where only an idle connection's end was at fault.

    An instance may close an idle connection at the moment it is used again. Before it has
    answered anything, this alone says nothing about the instance.
    """
    connection = pool.take(request.target.origin)
    if connection is None:
        connection = await _connected(pool, request, until_s)
    try:
        await connection.ask(request.head(), request.body or (), until_s)
    except BaseException as error:
        connection.abort()
        if not (isinstance(error, Broken) and connection.reused and connection.untouched):
            raise
    else:
        return connection
    return await _ask_anew(pool, request, until_s)


async def _ask_anew(pool: Pool, request: _Request, until_s: float) -> Connection:
    """Send a request over a connection of its own."""
    connection = await _connected(pool, request, until_s)
    connection.kept = False
    try:
        await connection.ask(request.head(Connection="close"), request.body or (), until_s)
    except BaseException:
        connection.abort()
        raise
    return connection


async def _connected(pool: Pool, request: _Request, until_s: float) -> Connection:
    async with asyncio.timeout_at(until_s):
        return await pool.connect(request.target.origin)
