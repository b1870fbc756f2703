"""HTTP client of all requests to instances. Failures of connections become errors of a stage.

The connections are those of `epd.http`. A reply is read whole (`WholeReply`), or while it arrives
(`Reply`).
"""

import asyncio
import errno
import math
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from epd.api.body import Pieces
from epd.errors import (
    Outcome,
    Overloaded,
    ProxyError,
    ReplyTooLarge,
    Stage,
    UpstreamDied,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from epd.http.connection import Broken, Connection, Died, Sink, Unreachable
from epd.http.http1 import HttpTarget, request_head, target_of
from epd.http.pool import Pool
from epd.http.tls import upstream_context
from epd.version import __version__

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

MAX_REPLY_BYTES = 16 * 1024**2
"""Maximum size of a reply of an encode or prefill instance, and of an error."""

KEEP_ALIVE_S = 2.0
"""Time for which an idle connection is pooled: under half of vLLM's
(`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`, 5 s), so that the proxy does not reuse one that vLLM has just
closed."""

OURS = f"User-Agent: epd/{__version__}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
"""Headers of every request."""

FAILURES = (Unreachable, Broken, TimeoutError)
"""Errors that `epd.http.connection` raises."""


def stage_error(
    error: Exception, stage: Stage, *, broken: str, late: str | None = None, computed: bool = False
) -> ProxyError:
    """Return the error of a stage. Addresses remain in the cause, which clients do not see.

    Args:
        error: one of `FAILURES`.
        stage: stage of the instance.
        broken: slug of a broken connection.
        late: slug of a timeout; None for the stage's.
        computed: whether the instance had computed its reply, and so survived the request.
    """
    instance = "the instance" if stage == "proxy" else f"the {stage} instance"
    if isinstance(error, TimeoutError):
        return UpstreamTimeout(
            f"{instance} did not answer in time", slug=late or f"{stage}_timeout", stage=stage
        )
    reason = underlying_error(error)
    if isinstance(reason, OSError) and reason.errno in OUT_OF_DESCRIPTORS:
        # The limit of this process, not a failure of the instance.
        return Overloaded("the proxy has too many open connections", stage=stage)
    failure: UpstreamFailed
    if isinstance(error, Broken):
        kind = UpstreamDied if isinstance(error, Died) and not computed else UpstreamFailed
        failure = kind(f"the connection to {instance} broke", slug=broken, stage=stage)
    else:
        failure = UpstreamUnreachable(f"{instance} is unreachable", slug=broken, stage=stage)
    if isinstance(reason, ConnectionRefusedError):
        failure.outcome = Outcome.REFUSED
    return failure


def underlying_error(error: Exception) -> BaseException:
    """Return the underlying error of a connection's own error."""
    return error.__cause__ or error


def too_large(stage: Stage, limit: int) -> ReplyTooLarge:
    """Return the error for a reply of more than `limit` bytes."""
    return ReplyTooLarge(
        f"the {stage} instance's reply is larger than {limit} bytes",
        slug=f"{stage}_bad_response",
        stage=stage,
    )


def is_success(status: int) -> bool:
    """Return whether a status is a 2xx."""
    return 200 <= status < 300  # noqa: PLR2004 - a member of `HTTPStatus` takes a call


class WholeReply(NamedTuple):
    """A complete reply of an instance."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        return is_success(self.status)


@dataclass(slots=True, eq=False)
class Reply:
    """A reply after its head. It must be closed, or used as a context manager.

    The deadline of its body, `_until_s`, is on the event loop's clock; `_late` is the slug of a
    timeout. Each read and wait raises `UpstreamFailed` if the body was cut off, and
    `UpstreamTimeout` if nothing was received for `idle_s` seconds.

    Attributes:
        status: HTTP status.
        headers: headers of the reply, case-insensitive.
        ok: whether the status is a 2xx. A page of HTML is not from vLLM, whatever its status.
    """

    _pool: Pool
    _connection: Connection
    _stage: Stage
    _until_s: float
    _late: str
    _body: bytes | None = None
    _ahead: bytes = b""
    status: int = field(init=False)
    headers: Mapping[str, str] = field(init=False)
    ok: bool = field(init=False)

    def __post_init__(self) -> None:
        # The connection may serve another request once it is released.
        self.status = self._connection.reply.status
        self.headers = self._connection.reply.headers
        html = self.headers.get("Content-Type", "").startswith("text/html")
        self.ok = is_success(self.status) and not html

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Pool the connection of a complete reply, and close any other."""
        self._pool.give_back(self._connection)

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events. The head of a stream precedes its first token."""
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    @property
    def is_whole(self) -> bool:
        return self._body is not None

    @property
    def read_bytes(self) -> int:
        """Number of bytes of the body that have been read and are still held."""
        return len(self._ahead if self._body is None else self._body)

    async def read(self, *, idle_s: float, limit: int = MAX_REPLY_BYTES) -> bytes:
        """Return the whole body; raise `ReplyTooLarge` above `limit` bytes.

        Further calls return it again.
        """
        if self._body is not None:
            return self._body
        size = 0

        def may_hold(more: int) -> bool:
            nonlocal size
            size += more
            if size > limit:
                raise too_large(self._stage, limit)
            return True

        return await self.read_ahead(idle_s, may_hold) or b""

    async def read_ahead(self, idle_s: float, may_hold: Callable[[int], bool]) -> bytes | None:
        """Return the whole body. Return None after a part of a size that may not be held.

        `may_hold` gets the size of each part. After None, `chunk` first returns what was read.
        """
        reply = self._connection.reply
        if reply.complete and not self._ahead and may_hold(reply.unread_bytes):
            self._body = self._connection.take_body()
            return self._body
        parts, accepted = list[bytes](), True
        while (
            accepted
            and (self._ahead or not reply.has_ended)
            and (chunk := await self.chunk(idle_s))
        ):
            parts.append(chunk)
            accepted = may_hold(len(chunk))
        read = parts[0] if len(parts) == 1 else b"".join(parts)
        if not accepted:
            self._ahead = read
            return None
        self._body = read
        return read

    async def wait_body(self, idle_s: float) -> None:
        try:
            await self._connection.wait_body(self._deadline_s(idle_s))
        except FAILURES as error:
            raise self._broken_error(error) from underlying_error(error)

    async def chunk(self, idle_s: float) -> bytes:
        """Return the next received part of the body; empty at its end."""
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            return ahead
        try:
            return await self._connection.chunk(self._deadline_s(idle_s))
        except FAILURES as error:
            raise self._broken_error(error) from underlying_error(error)

    async def peek_body(self, enough: Callable[[bytes], bool], within_s: float) -> bytes:
        """Return the beginning of the body, which stays unread.

        Wait until it is `enough`, for at most `within_s` seconds.
        """
        until_s = min(asyncio.get_running_loop().time() + within_s, self._until_s)
        with suppress(*FAILURES):  # the next read raises it again, but for the end of this time
            while not enough(self._ahead) and (chunk := await self._connection.chunk(until_s)):
                self._ahead += chunk
        return self._ahead

    async def pour_body(self, sink: Sink, idle_s: float) -> bool:
        """Pass the body to `sink` as it is received, without waking a task, while it accepts more.

        Return whether the body has ended.
        """
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            if not sink(ahead):
                return self._connection.reply.has_ended
        try:
            return await self._connection.pour_body(sink, idle_s)
        except FAILURES as error:
            raise self._broken_error(error) from underlying_error(error)

    def _deadline_s(self, idle_s: float) -> float:
        return min(asyncio.get_running_loop().time() + idle_s, self._until_s)

    def _broken_error(self, error: Exception) -> ProxyError:
        # The head of a stream precedes its first token; any other head follows the last one.
        computed = not self.is_stream
        broken = f"{self._stage}_died"
        return stage_error(error, self._stage, broken=broken, late=self._late, computed=computed)


class Upstream:
    """Sends requests to instances over one connection pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @classmethod
    @asynccontextmanager
    async def connect(cls, tls: ssl.SSLContext | None = None) -> AsyncIterator[Self]:
        """Return a client with a pool, which is closed at the exit.

        It verifies instances by `tls`, or else by the system's CAs.
        """
        pool = Pool(tls or upstream_context(None), keep_alive_s=KEEP_ALIVE_S)
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
        """Send a request (POST with a body, GET without) and wait for the head of its reply.

        The caller closes the reply. If its body has not been read by then, this closes the
        connection, which tells the instance that the request is abandoned.

        Raises:
            UpstreamFailed: it could not be sent, or the connection broke.
            UpstreamTimeout: no head was received within `head_timeout_s` seconds.
        """
        until_s = asyncio.get_running_loop().time() + head_timeout_s
        connection = await self._exchange(_request(url, headers, body, stage), until_s)
        return Reply(self._pool, connection, stage, math.inf, f"{stage}_stalled")

    async def fetch(
        self,
        url: str,
        *,
        stage: Stage,
        headers: Mapping[str, str],
        body: Pieces | None = None,
        timeout_s: float,
    ) -> WholeReply:
        """Send a request and read the whole reply, with any status.

        Raises:
            UpstreamFailed: it could not be sent, the reply was cut off, or is too large.
            UpstreamTimeout: the reply was not complete within `timeout_s` seconds.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        connection = await self._exchange(_request(url, headers, body, stage), until_s)
        with Reply(self._pool, connection, stage, until_s, f"{stage}_timeout") as reply:
            return WholeReply(reply.status, reply.headers, await reply.read(idle_s=timeout_s))

    async def _exchange(self, request: "_Request", until_s: float) -> Connection:
        """Send a request, and return its connection after the head of the reply.

        The request is sent a second time if only the end of an idle connection was at fault: an
        instance may close an idle connection at the moment of its reuse. Before any byte of an
        reply, this says nothing about the instance. If the instance then accepts no new
        connection, it died while it had the request.
        """
        origin, stage = request.target.origin, request.stage
        try:
            connection = self._pool.take_connection(origin) or await self._pool.connect(
                origin, until_s
            )
            try:
                await connection.send_request(request.head(), request.body or (), until_s)
            except BaseException as error:
                connection.abort()
                if not (isinstance(error, Broken) and connection.is_stale):
                    raise
                connection = await self._send_again(request, until_s, error)
        except FAILURES as error:
            raise stage_error(error, stage, broken=f"{stage}_failed") from underlying_error(error)
        if connection.reply.headers.get("Content-Encoding", "identity").lower() != "identity":
            connection.abort()
            raise UpstreamFailed(
                f"the {stage} instance's reply has an unsupported encoding",
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
            connection = await self._send_on_new(_request(url, {}, None, "proxy"), until_s)
        except UpstreamUnreachable:
            return False
        except FAILURES as error:
            failure = stage_error(error, "proxy", broken="unreachable")
            if isinstance(failure, Overloaded):
                raise failure from error
            return False
        connection.abort()
        return is_success(connection.reply.status)

    async def _send_again(self, request: "_Request", until_s: float, broken: Broken) -> Connection:
        try:
            return await self._send_on_new(request, until_s)
        except Unreachable as error:
            if isinstance(broken, Died):
                raise Died from underlying_error(error)
            raise

    async def _send_on_new(self, request: "_Request", until_s: float) -> Connection:
        connection = await self._pool.connect(request.target.origin, until_s)
        connection.reusable = False
        try:
            head = request.head("Connection: close\r\n")
            await connection.send_request(head, request.body or (), until_s)
        except BaseException:
            connection.abort()
            raise
        return connection


class _Request(NamedTuple):
    target: HttpTarget
    headers: Mapping[str, str]
    body: Pieces | None
    stage: Stage

    def head(self, more: str = "") -> bytes:
        length = None if self.body is None else sum(map(len, self.body))
        return request_head(self.target, self.headers, length, OURS + more)


def _request(url: str, headers: Mapping[str, str], body: Pieces | None, stage: Stage) -> _Request:
    try:
        return _Request(target_of(url), headers, body, stage)
    except ValueError as error:
        raise UpstreamUnreachable(
            f"the URL of the {stage} instance is invalid", slug=f"{stage}_failed", stage=stage
        ) from error
