"""Connection of an event loop to the server of an arena: many calls at once, and no thread.

The server is at a Unix socket of this host, or at another host (`ec_store.arena.remote_store`).
"""

import asyncio
import os
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from ec_store.arena.protocol import (
    MAX_REPLY_BYTES,
    VERSION,
    ArenaRequest,
    BadMessage,
    Failed,
    Frames,
    Hello,
    Message,
    Reply,
    Welcome,
    encode,
    read_reply,
)
from ec_store.arena.sockets import check_folder
from ec_store.counts import after_fork
from ec_store.errors import StoreUnavailable

CONNECT_EVERY_S = 0.1
"""Shortest time in seconds from a failed connection to the next attempt. Calls fail meanwhile."""

LOOK_AGAIN_S = 0.05
"""Time in seconds in which a reply is read that has come in time while the event loop was busy."""

R = TypeVar("R", bound=Message)


class ArenaEndpoint(Protocol):
    """Address of a server."""

    @property
    def name(self) -> str:
        """Return the server as messages name it."""

    @property
    def hello(self) -> Hello:
        """Return the first request."""

    async def open(self, link: asyncio.Protocol) -> socket.socket:
        """Connect a protocol, and return its socket. Raise OSError if it cannot be connected."""


@dataclass(frozen=True, slots=True)
class UnixEndpoint:
    """Path of the Unix socket of a server on this host."""

    path: str

    @property
    def name(self) -> str:
        return f"the arena at {self.path}"

    @property
    def hello(self) -> Hello:
        return Hello(VERSION, "proxy")

    async def open(self, link: asyncio.Protocol) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            check_folder(Path(self.path).parent)
            connection.setblocking(False)
            connection.connect(self.path)  # at once, or not at all: it never waits
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: link, sock=connection)
        except BaseException:
            connection.close()
            raise
        return connection


class AsyncArenaConnection:
    """Connection that is made at the first call, and again after a failure. For one event loop.

    It gets no memory (the role `proxy`). After a fork, the child has no part in it.

    Attributes:
        arena: name of the server's memory, a new one at each start; empty before the first call.
    """

    def __init__(
        self, endpoint: ArenaEndpoint, timeout_s: float, *, connect_every_s: float = CONNECT_EVERY_S
    ) -> None:
        """Create a connection to a server, which may take `timeout_s` for a reply."""
        self.arena = b""
        self._endpoint = endpoint
        self._name = endpoint.name
        self._timeout_s = timeout_s
        self._connect_every_s = connect_every_s
        self._link: _Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self._problem = f"{self._name}: there is no connection"
        self._again_s = 0.0
        self._closed = False
        after_fork(self._forget_parent)

    async def call(self, request: ArenaRequest[R]) -> R:
        """Send a request, and return its reply. The reply to a cancelled call is dropped.

        Raises:
            StoreUnavailable: there is no server, it is too slow, or its reply is unusable. All
                unanswered calls fail then, and the next call connects again.
        """
        link = self._link
        if link is None or not link.usable:
            link = await self._connect()
        return cast("R", await link.ask(request))

    async def close(self) -> None:
        """Close the connection; the server frees what it held. Unanswered calls fail."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._link is not None:
            self._link.end("it is closed")
            await self._link.lost.wait()

    async def _connect(self) -> "_Link":
        """Return a new connection; calls at the same time share it.

        Raises:
            StoreUnavailable: it cannot be made, or could not be made a moment ago.
        """
        if self._closed:
            raise StoreUnavailable(f"{self._name}: it is closed")
        if self._connecting is None:
            loop = asyncio.get_running_loop()
            if loop.time() < self._again_s:
                raise StoreUnavailable(self._problem)
            self._connecting = loop.create_task(self._reconnect())
        await asyncio.wait([self._connecting])  # which goes on if this call is cancelled
        if self._link is None or not self._link.usable:
            raise StoreUnavailable(self._problem)
        return self._link

    async def _reconnect(self) -> None:
        try:
            self._link = await self._new_link()
        except StoreUnavailable as error:
            self._problem = str(error)
            self._again_s = asyncio.get_running_loop().time() + self._connect_every_s
        finally:
            self._connecting = None

    async def _new_link(self) -> "_Link":
        link = _Link(self._name, self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                self._socket = await self._endpoint.open(link)
        except (OSError, ValueError) as error:  # no connection in time; no name of a host
            problem = str(error) or f"no connection within {self._timeout_s:g} s"
            raise StoreUnavailable(f"{self._name}: {problem}") from error
        try:
            self.arena = cast("Welcome", await link.ask(self._endpoint.hello)).arena
        except BaseException:
            link.end("it is closed")
            await link.lost.wait()
            raise
        return link

    def _forget_parent(self) -> None:
        """Close the parent's socket in a child of `fork`, so that claims end with the parent."""
        if self._socket is not None:
            with suppress(OSError):
                os.close(self._socket.detach())
        self._socket = self._link = self._connecting = None


class _Call(NamedTuple):
    """Unanswered request, with the future of its reply and its deadline."""

    reply_type: type[Message]
    reply: "asyncio.Future[Reply]"
    until_s: float


class _Link(asyncio.Protocol):
    """One connection, and its unanswered calls in their order.

    One timer watches the oldest call, whatever the number of calls.

    Attributes:
        lost: whether its socket is closed.
    """

    transport: asyncio.Transport

    def __init__(self, name: str, timeout_s: float) -> None:
        self.lost = asyncio.Event()
        self._name = name
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(MAX_REPLY_BYTES)
        self._calls: deque[_Call] = deque()
        self._late: _Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    @property
    def usable(self) -> bool:
        return not self._ended and not self.transport.is_closing()

    def ask(self, request: ArenaRequest[Any]) -> "asyncio.Future[Reply]":
        """Send a request; return the future of its reply."""
        call = _Call(
            request.reply_type, self._loop.create_future(), self._loop.time() + self._timeout_s
        )
        self._calls.append(call)
        self.transport.write(encode(request))
        if self._timer is None:
            self._timer = self._loop.call_at(call.until_s, self._check)
        return call.reply

    def end(self, problem: str) -> None:
        """Close the connection; unanswered calls fail."""
        if self._ended:
            return
        self._ended = True
        for call in self._calls:
            if not call.reply.done():
                call.reply.set_exception(StoreUnavailable(f"{self._name}: {problem}"))
        self._calls.clear()
        if self._timer is not None:
            self._timer.cancel()
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            for body in self._frames.split(data):
                self._receive(read_reply(body))
        except BadMessage as error:
            self.end(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(str(exc or "the server has closed the connection"))
        self.lost.set()

    def _receive(self, reply: Reply) -> None:
        if isinstance(reply, Failed):
            raise BadMessage(reply.text)
        if not self._calls or not isinstance(reply, self._calls[0].reply_type):
            raise BadMessage(f"an unexpected reply: {reply!r:.200}")
        call = self._calls.popleft()
        if not call.reply.done():
            call.reply.set_result(reply)

    def _check(self) -> None:
        """End the connection if the reply to the oldest call is late.

        After a pause of the process, uvloop runs timers before it reads what has come.
        """
        self._timer = None
        if not self._calls:
            return
        call, now_s = self._calls[0], self._loop.time()
        if call is self._late and call.until_s <= now_s:
            self.end(f"no reply within {self._timeout_s:g} s")
            return
        if call.until_s <= now_s:
            self._late = call
        self._timer = self._loop.call_at(max(call.until_s, now_s + LOOK_AGAIN_S), self._check)
