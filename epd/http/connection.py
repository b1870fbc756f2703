"""A connection to an HTTP/1.1 server: one request at a time.

Waits have no timer of their own: each connection has one, which is set anew only where it would
come too late (`Connection._wait`).
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import cast

from multidict import CIMultiDict

from epd.http.http1 import AnswerReader, Malformed

PIECE_BYTES = 256 * 1024
"""A body is written so many bytes at a time, so that neither TLS nor a copy holds the loop."""
JOINED_BYTES = 16 * 1024
"""A larger body is handed to the kernel in its pieces: to join them costs more than one more of
them does."""
STALE_S = 1.0
"""How long a request may be on its way until it meets a connection that was closed while idle."""
DEAD_HOST_S = 120
"""How long a host may leave data or keep-alive probes without an acknowledgement. The kernel of a
host that is up acknowledges both, however long its server takes to answer."""
PROBE_IDLE_S, PROBE_INTERVAL_S = 60, 15
"""When the first keep-alive probe is sent on a silent connection, and each further one."""
READ_BUFFER_BYTES = 256 * 1024
"""What nobody has taken yet of an answer; with more than that, it is not read any further."""

Sink = Callable[[bytes], bool]
"""Takes a piece of a body, and says whether it can take another one."""


class Unreachable(Exception):
    """There is no connection to be had. The cause says why."""


class Broken(Exception):
    """The connection ended before the answer did, or what came is none."""


class Died(Broken):
    """The connection ended after all of a request was sent: the server may have died of it."""


def _find_dead_hosts(shown: socket.socket) -> None:
    """Have the kernel end a connection to a host that acknowledges nothing any more.

    uvloop's own object duplicates the descriptor for each option.
    """
    opened = socket.socket(shown.family, shown.type, shown.proto, fileno=shown.fileno())
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_IDLE_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_INTERVAL_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_HOST_S * 1000)
    finally:
        opened.detach()


class Connection(asyncio.Protocol):
    """One connection, and the exchange that is under way on it.

    Attributes:
        reused: whether the request under way is not its first.
        kept: whether it may be used again.
        idle_since_s: since when it has had nothing to do, on the event loop's clock.
    """

    def __init__(self) -> None:
        self.reused = False
        self.kept = True
        self.idle_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._answer = AnswerReader()
        self._asked = False
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
    def status(self) -> int:
        """The answer's; 0 until its head has come."""
        return self._answer.status

    @property
    def headers(self) -> CIMultiDict[str]:
        """The answer's."""
        return self._answer.headers

    @property
    def complete(self) -> bool:
        """Whether all of the answer has come."""
        return self._answer.complete

    @property
    def held(self) -> int:
        """Bytes of the answer's body that have come and were not taken."""
        return self._answer.held

    @property
    def ended(self) -> bool:
        """Whether all of the answer has come and was taken."""
        return self._answer.complete and not self._answer.held

    @property
    def stale(self) -> bool:
        """Whether it broke as one does that the server closed while it was idle.

        No byte of an answer has come, and the request had just been sent: a server that reads a
        request and dies of it, or works on it for a while first, looks different.
        """
        sent_s = self._sent_s
        just_sent = sent_s is None or self._loop.time() - sent_s < STALE_S
        return self.reused and not self._answer.begun and just_sent

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return (
            self.kept
            and self._reading  # else the next answer would not be read
            and (not self._asked or self._answer.reusable)
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    async def ask(self, head: bytes, body: Sequence[bytes | memoryview], until_s: float) -> None:
        """Send a request and wait for the head of its answer.

        Raises:
            Broken: the connection ended, or what came is no answer.
            TimeoutError: it was not there at `until_s`, on the event loop's clock.
        """
        self.reused, self._asked = self._asked, True
        self._sent_s = None
        self._answer.expect()
        self._check_open()
        size = sum(map(len, body))
        if size <= JOINED_BYTES:
            self._transport.write(b"".join((head, *body)))
        elif size <= PIECE_BYTES:
            self._transport.writelines((head, *body))
        else:
            self._transport.write(head)
            for piece in body:
                await self._send(memoryview(piece), until_s)
        self._sent_s = self._loop.time()
        while not self._answer.status:
            await self._wait(until_s)

    async def _send(self, body: memoryview, until_s: float) -> None:
        for start in range(0, len(body), PIECE_BYTES):
            # Who has answered by now may not read the rest, and is not waited for.
            while not self._writable and not self._answer.status:
                await self._wait(until_s)
            # RFC 9112, 9.5: send no more after an error. A complete answer needs no more either.
            if self._answer.status >= HTTPStatus.BAD_REQUEST or self._answer.complete:
                self.kept = False
                return
            self._check_open()
            self._transport.write(body[start : start + PIECE_BYTES])

    def _check_open(self) -> None:
        """Check before each write that the connection has not ended.

        uvloop resumes writing on a transport that has just been aborted, and its `write` then
        raises RuntimeError.

        Raises:
            Broken: the connection has ended.
        """
        if self._failure is not None:
            raise Broken from self._failure

    async def begun(self, until_s: float) -> None:
        """Wait for the first byte of the body, or for its end. Nothing is taken.

        Raises:
            Broken: the connection ended before it.
            TimeoutError: it was not there at `until_s`, on the event loop's clock.
        """
        while not (self._answer.held or self._answer.complete):
            await self._wait(until_s)

    async def chunk(self, until_s: float) -> bytes:
        """What has come of the body since the last one; empty when it has ended.

        Raises:
            Broken: the connection ended before it.
            TimeoutError: nothing came until `until_s`, on the event loop's clock.
        """
        while not (data := self.take()):
            if self._answer.complete:
                return b""
            await self._wait(until_s)
        return data

    async def pour(self, sink: Sink, idle_s: float) -> bool:
        """Hand on the body as it comes, with no task woken for it, while `sink` can take more.

        Returns:
            Whether it has ended.

        Raises:
            Broken: the connection ended before it.
            TimeoutError: nothing came for `idle_s` seconds.
        """
        self._sink, self._idle_s = sink, idle_s
        try:
            more = self._poured()
            while more:
                await self._wait(self._loop.time() + idle_s)
                more = self._poured()
        finally:
            self._sink = None
        return self.ended

    def _poured(self) -> bool:
        """Hand on what has come; whether more will be, with nobody woken for it."""
        sink = self._sink
        if sink is None:
            return False
        if self._answer.held:
            data = self.take()
            self._until_s = self._loop.time() + self._idle_s
            if not sink(data):
                self._sink = None
                return False
        return not self._answer.complete

    def take(self) -> bytes:
        """Take what has come of the body."""
        data = self._answer.take()
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        return data

    def abort(self) -> None:
        """End it now. Whoever is at the other end learns that nobody waits any more."""
        self._transport.abort()

    async def _wait(self, until_s: float) -> None:
        """Wait until something has happened."""
        if self._failure is not None:
            raise self._broken() from self._failure
        self._until_s = until_s
        if self._timer is None or self._timer.when() > until_s:
            self._set_timer()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _broken(self) -> Broken:
        died = self._sent_s is not None and not isinstance(self._failure, Malformed)
        return Died() if died else Broken()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._until_s, self._check)

    def _check(self) -> None:
        """Look whether it is too late: since the timer was set, something may have happened."""
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

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where requests go."""
        self._transport = cast("asyncio.Transport", transport)
        _find_dead_hosts(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """Read what has come."""
        if not self._asked or self._answer.complete:  # nobody has asked for it
            self.abort()
            return
        try:
            self._answer.feed(data)
        except Malformed as error:
            self._failure = error
            self.abort()
        if self._poured() and self._failure is None:
            return
        if self._answer.held > READ_BUFFER_BYTES and self._reading:
            self._reading = False
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who waits, unless that has made the answer complete."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._failure is None and (exc is not None or not self._answer.ended()):
            self._failure = exc or ConnectionResetError("the connection was closed")
        self._wake()

    def pause_writing(self) -> None:
        """The other end does not take more for now."""
        self._writable = False

    def resume_writing(self) -> None:
        """It does again."""
        self._writable = True
        self._wake()
