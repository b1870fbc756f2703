"""A connection to an HTTP/1.1 server: one request at a time.

A wait has no timer of its own. Each connection has one timer, which is reset only if it would fire
too late (`Connection._wait`).
"""

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import cast

from epd.http.http1 import Malformed, Origin, ReplyReader

PIECE_BYTES = 256 * 1024
"""Size of the batches of a large request. Larger ones block the event loop in TLS or in a copy."""
JOINED_BYTES = 16 * 1024
"""Size up to which head and body are joined. A larger copy costs more than one piece more."""
STALE_S = 1.0
"""Time after sending in which the end of a reused connection is attributed to its idle time."""
DEAD_HOST_S = 120
"""Time for which a host may leave data or keep-alive probes unacknowledged. The kernel of a host
that is up acknowledges both, however long its server takes to answer."""
PROBE_IDLE_S, PROBE_INTERVAL_S = 60, 15
"""Delay of the first keep-alive probe on a silent connection, and interval of further ones."""
READ_BUFFER_BYTES = 256 * 1024
"""Size of the unread part of a reply above which reading from the socket pauses."""

Sink = Callable[[bytes], bool]
"""Receives a piece of a body. Returns whether it can accept another one."""


class Unreachable(Exception):
    """The connection could not be established. The cause has the reason."""


class Broken(Exception):
    """The connection ended before the reply, or the reply is invalid."""


class Died(Broken):
    """The connection ended after all of a request was sent, which may have killed the server."""


def _enable_keepalive(shown: socket.socket) -> None:
    """Let the kernel close a connection to a host that no longer acknowledges."""
    # The socket object of uvloop duplicates the descriptor for each option; this one does not.
    opened = socket.socket(shown.family, shown.type, shown.proto, fileno=shown.fileno())
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_IDLE_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_INTERVAL_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_HOST_S * 1000)
    finally:
        opened.detach()


def _batches(parts: Iterable[bytes | memoryview]) -> Iterator[Sequence[memoryview]]:
    """Yield a large request in batches of `PIECE_BYTES`, each for one call to the kernel."""
    batch, room = list[memoryview](), PIECE_BYTES
    for part in (memoryview(part) for part in parts):
        start = 0
        while len(part) - start > room:
            yield [*batch, part[start : start + room]]
            start += room
            batch, room = [], PIECE_BYTES
        batch.append(part[start:])
        room -= len(part) - start
    yield batch


class Connection(asyncio.Protocol):
    """A connection, and the exchange in progress on it.

    Each wait raises `Broken` if the connection ends before, or the reply is invalid. It raises
    `TimeoutError` if nothing is received in time: until `until_s`, on the event loop's clock.

    Attributes:
        origin: its server.
        reply: the reply to the current request, as far as it has been received.
        reused: whether the current request is not its first.
        reusable: whether it may be reused.
        idle_since_s: start of its idle time, on the event loop's clock.
    """

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.reused = False
        self.reusable = True
        self.idle_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self.reply = ReplyReader()
        self._requested = False
        self._sent_s: float | None = None
        self._failure: Exception | None = None
        self._writable = True
        self._reading = True
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._idle_s = 0.0
        self._until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_stale(self) -> bool:
        """Whether it failed in the way of a connection that the server closed while it was idle.

        No byte of a reply has been received, and the request was sent only just before. A server
        that reads a request and dies of it, or works on it first, fails differently.
        """
        sent_s = self._sent_s
        just_sent = sent_s is None or self._loop.time() - sent_s < STALE_S
        return self.reused and not self.reply.begun and just_sent

    @property
    def is_usable(self) -> bool:
        return (
            self.reusable
            and self._reading  # else the next reply would not be read
            and (not self._requested or self.reply.reusable)
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    async def send_request(
        self, head: bytes, body: Sequence[bytes | memoryview], until_s: float
    ) -> None:
        """Send a request, and wait for the head of the reply."""
        self.reused, self._requested = self._requested, True
        self._sent_s = None
        self.reply.start_reply()
        self._check_open()
        size = sum(map(len, body))
        if size <= JOINED_BYTES:
            self._transport.write(b"".join((head, *body)))
        elif size <= PIECE_BYTES:
            self._write_all((head, *body))
        else:
            for batch in _batches((head, *body)):
                await self._send(batch, until_s)
            del batch  # which refers to the whole body
        self._sent_s = self._loop.time()
        while not self.reply.status:
            await self._wait(until_s)

    async def _send(self, batch: Sequence[memoryview], until_s: float) -> None:
        # A server that has answered already may not read the rest of the body, so do not wait.
        while not self._writable and not self.reply.status:
            await self._wait(until_s)
        # RFC 9112, 9.5: send no more after an error. A complete reply needs no more either.
        if self.reply.status >= HTTPStatus.BAD_REQUEST or self.reply.complete:
            self.reusable = False
            return
        self._check_open()
        self._write_all(batch)

    def _write_all(self, parts: Iterable[bytes | memoryview]) -> None:
        # Not `writelines`: in early releases of Python 3.12 and 3.13, asyncio's never pauses
        # writing, and never ends on a lost connection.
        for part in parts:
            self._transport.write(part)

    def _check_open(self) -> None:
        """Raise `Broken` before a write if the connection has ended.

        uvloop resumes writing on a transport that was aborted just before, and its `write` then
        raises RuntimeError.
        """
        if self._failure is not None:
            raise Broken from self._failure

    async def wait_body(self, until_s: float) -> None:
        while not (self.reply.unread_bytes or self.reply.complete):
            await self._wait(until_s)

    async def chunk(self, until_s: float) -> bytes:
        """Return the next received part of the body; empty at its end."""
        while not (data := self.take_body()):
            if self.reply.complete:
                return b""
            await self._wait(until_s)
        return data

    async def pour_body(self, sink: Sink, idle_s: float) -> bool:
        """Pass the body to `sink` as it is received, without waking a task, while it accepts more.

        Return whether the body has ended. A wait for the next part takes at most `idle_s` seconds.
        """
        self._sink, self._idle_s = sink, idle_s
        try:
            while self._pour_received():
                await self._wait(self._loop.time() + idle_s)
        finally:
            self._sink = None
        return self.reply.has_ended

    def _pour_received(self) -> bool:
        """Pass the received part to the sink. Return whether it accepts more without a wake-up."""
        sink = self._sink
        if sink is None:
            return False
        if self.reply.unread_bytes:
            data = self.take_body()
            self._until_s = self._loop.time() + self._idle_s
            if not sink(data):
                self._sink = None
                return False
        return not self.reply.complete

    def take_body(self) -> bytes:
        data = self.reply.take_body()
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        return data

    def abort(self) -> None:
        """Close the connection at once. The server sees that the request is abandoned."""
        self._transport.abort()

    async def _wait(self, until_s: float) -> None:
        if self._failure is not None:
            died = self._sent_s is not None and not isinstance(self._failure, Malformed)
            raise (Died() if died else Broken()) from self._failure
        self._until_s = until_s
        if self._timer is None or self._timer.when() > until_s:
            self._set_timer()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._until_s, self._check)

    def _check(self) -> None:
        """Raise a timeout if the deadline has passed; events may have moved it since."""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._until_s:
            self._set_timer()
        else:
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _enable_keepalive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if not self._requested or self.reply.complete:  # no request is waiting for it
            self.abort()
            return
        try:
            self.reply.feed(data)
        except Malformed as error:
            self._failure = error
            self.abort()
        if self._pour_received() and self._failure is None:
            return
        if self.reply.unread_bytes > READ_BUFFER_BYTES and self._reading:
            self._reading = False
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake the waiter with an error, unless the end of the connection completes the reply."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._failure is None and (exc is not None or not self.reply.connection_ended()):
            self._failure = exc or ConnectionResetError("the connection was closed")
        self._wake()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._wake()
