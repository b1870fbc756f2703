"""Server of an arena, on a Unix socket. No byte of an entry passes through it.

What a client holds belongs to its connection. If a client closes it in the middle of copies, or
ends, what it had pinned or begun stays until the process is gone: a device may still be copying.
"""

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from ec_store.arena.arena import Arena
from ec_store.arena.checksums import Checksums
from ec_store.arena.index import ArenaIndex, Client
from ec_store.arena.memory import ArenaMemory, map_memory
from ec_store.arena.protocol import (
    MAX_REQUEST_BYTES,
    VERSION,
    BadMessage,
    Begin,
    ClaimKeys,
    Delete,
    Done,
    End,
    Failed,
    Find,
    Forget,
    Frames,
    Hello,
    Read,
    Reply,
    Request,
    Role,
    Wait,
    Welcome,
    encode,
    read_request,
)
from ec_store.arena.tier import Tier, TierTransfers

logger = logging.getLogger("vllm.ec_store")

HELLO_S = 5.0
"""Time in seconds in which a new connection must send its first request."""

GONE_S = 60.0
"""Time in seconds after which the copies of a client that is gone are taken to have ended, if the
kernel gives no descriptor of its process: before Linux 6.5 (`SO_PEERPIDFD`), and in another PID
namespace."""

ACCEPT_AGAIN_S = 0.1
EXPIRE_EVERY_S = 10.0
BACKLOG = 128
MAX_CONNECTIONS = 1024
MAX_HELLO_BYTES = 256
MAX_UNREAD_BYTES = 2**20
"""Upper bound of the replies that a client has not read when it sends a request. One read may
deliver thousands of requests, so a pause of reading does not bound the replies."""

MAX_PENDING = 64
"""Requests of a client above which no more are read, while one of them waits for the tier."""

NEEDS_MEMORY: Mapping[Role, tuple[type, ...]] = {"proxy": (Read, Begin), "reader": (Begin,)}
"""Requests for which the memory of a client is missing, by its role."""

_SO_PEERPIDFD = 77  # <asm-generic/socket.h>
_CREDENTIALS = struct.Struct("=3i")


class ArenaServer:
    """Listener of an arena, on one event loop."""

    def __init__(
        self,
        memory: ArenaMemory,
        index: ArenaIndex,
        *,
        tier: Tier | None = None,
        gone_s: float = GONE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the server.

        Args:
            memory: the memory, the descriptor of which the server closes.
            index: index of its entries.
            tier: store behind the memory, which the server closes.
            gone_s: as `GONE_S`.
            clock: monotonic clock in seconds.
        """
        self.arena = Arena(index, memory.size_bytes)
        self.clock = clock
        self.waiting: defaultdict[bytes, set[Session]] = defaultdict(set)
        self._gone_s = gone_s
        self._memory = memory
        self._name = secrets.token_bytes(16)
        self._read_only = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._sessions: dict[int, Session] = {}
        self._gone: dict[int, Peer] = {}
        self._checksums = Checksums(index, map_memory(memory.fd, memory.size_bytes, write=False))
        self._tasks: set[asyncio.Task[None]] = set()
        self._tier: TierTransfers | None = None
        if tier is not None:
            mapped = map_memory(memory.fd, memory.size_bytes, write=True)
            self._tier = TierTransfers(tier, self.arena, mapped, self.settle_waits, clock)

    def start(self, listener: socket.socket) -> None:
        """Accept connections of a socket from `bind`, which the server closes."""
        listener.listen(BACKLOG)
        loop = asyncio.get_running_loop()
        self._tasks.add(loop.create_task(self._accept(listener)))
        self._tasks.add(loop.create_task(self._expire()))
        self._tasks.add(loop.create_task(self._checksums.run()))
        if self._tier is not None:
            self._tier.start()

    async def close(self) -> None:
        """Stop listening and disconnect all clients. Their memory stays mapped in them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tier is not None:
            await self._tier.close()
        for session in list(self._sessions.values()):
            session.transport.abort()
        await asyncio.sleep(0)
        for number in list(self._gone):
            self._forget(number)
        os.close(self._read_only)
        os.close(self._memory.fd)

    def answer(self, session: "Session", request: Request) -> Reply | None:
        """Return the reply to a request; answer the clients that waited for its effect."""
        if isinstance(request, Forget):
            self._forget_earlier(request.session)
            return Done()
        if isinstance(request, NEEDS_MEMORY.get(session.role, ())):
            raise BadMessage(f"a {session.role} sends no {type(request).__name__}")
        written = session.client.writes.get(request.number) if isinstance(request, End) else None
        reply = self.arena.answer(session.client, request, self.clock())
        if self._tier is not None:
            if written is not None and reply == Done(1):
                self._tier.offer(written)
            elif isinstance(request, Delete):
                self._tier.remove(request.digests)
        self.settle_waits()
        self._checksums.wake()
        return reply

    def look_up(self, request: Request) -> "asyncio.Task[None] | None":
        """Look up in the tier what a request asks for and the memory lacks.

        Return a task that ends soon, after which the request is answered; None: at once.
        """
        if self._tier is not None:
            match request:
                case Find(digests) | Read(digests) | ClaimKeys(digests, find=True):
                    return self._tier.look_up(digests)
        return None

    def settle_waits(self) -> None:
        """Answer the clients that waited for entries that have changed."""
        changed = self.arena.index.changed
        while changed:
            for session in list(self.waiting.get(changed.pop(), ())):
                session.settle_wait()

    def lose(self, session: "Session") -> None:
        """Take back what a client held, now or when its process is gone."""
        number, client = session.number, session.client
        del self._sessions[number], self.arena.clients[number]
        self.arena.index.disconnect(client)
        peer = session.peer
        if not client.pins and not client.writes:
            peer.close()
        else:
            self.arena.gone[number] = client
            self._gone[number] = peer
            loop = asyncio.get_running_loop()
            if peer.pidfd is None:
                peer.timer = loop.call_later(self._gone_s, self._forget, number)
            else:
                loop.add_reader(peer.pidfd, self._forget, number)
        self.settle_waits()

    def _forget_earlier(self, number: int) -> None:
        """Forget a connection of a client that has lost it, and alone knows its number."""
        if number in self._gone:
            self._forget(number)
        elif earlier := self._sessions.get(number):
            earlier.transport.abort()  # the end of its connection has not been read yet
            self.arena.index.disconnect(earlier.client)
            self.arena.index.forget(earlier.client, self.clock())
            self.settle_waits()

    def _forget(self, number: int) -> None:
        peer = self._gone.pop(number)
        if peer.pidfd is not None:
            asyncio.get_running_loop().remove_reader(peer.pidfd)
        peer.close()
        self.arena.index.forget(self.arena.gone.pop(number), self.clock())
        self.settle_waits()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self.arena.index.expire(self.clock())
            self.settle_waits()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # no descriptor is left
                    logger.warning("the arena cannot accept a connection: %s", error)
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                greeting = loop.create_task(self._greet(connection))
                self._tasks.add(greeting)
                greeting.add_done_callback(self._tasks.discard)

    async def _greet(self, connection: socket.socket) -> None:
        """Answer the first request of a connection, which gets the memory's descriptor."""
        peer: Peer | None = None
        try:
            peer = Peer.of(connection)
            async with asyncio.timeout(HELLO_S):
                hello = await _read_hello(connection)
            session = Session(self, secrets.randbits(62), peer, hello.role)
            self._welcome(connection, hello, session.number)
        except BaseException as error:
            connection.close()
            if peer is not None:
                peer.close()
            if not isinstance(error, OSError | BadMessage):  # TimeoutError is an OSError
                raise
            return
        self._sessions[session.number] = session
        self.arena.clients[session.number] = session.client
        await asyncio.get_running_loop().connect_accepted_socket(lambda: session, connection)

    def _welcome(self, connection: socket.socket, hello: Hello, number: int) -> None:
        """Answer a first request, with the memory's descriptor.

        Raises:
            OSError: the client is gone.
            BadMessage: the client is refused, and has been told why.
        """
        memory = self._memory
        if (problem := self._refusal(hello)) is not None:
            connection.send(encode(Failed(problem)))
            raise BadMessage(problem)
        welcome = Welcome(self._name, number, memory.size_bytes, memory.segment_bytes)
        memories = {"proxy": [], "reader": [self._read_only], "writer": [memory.fd]}
        socket.send_fds(connection, [encode(welcome)], memories[hello.role])

    def _refusal(self, hello: Hello) -> str | None:
        if hello.version != VERSION:
            return (
                f"the server of the arena speaks version {VERSION} of its protocol, this client "
                f"version {hello.version}: run one release of ec_store in both"
            )
        if len(self._sessions) >= MAX_CONNECTIONS:
            return f"the arena has {MAX_CONNECTIONS} connections, which is the maximum"
        return None


@dataclass(slots=True, eq=False)
class Peer:
    """Process at the other end of a connection.

    Attributes:
        pidfd: descriptor of it, which is readable once it has ended; None: the kernel gives none.
    """

    pidfd: int | None
    timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, connection: socket.socket) -> Self:
        """Return the peer of a connection."""
        pidfd: int | None = None
        try:
            pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
            os.set_inheritable(pidfd, False)
        except OSError:  # if its number belongs to another process by now, bytes stay longer
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            with suppress(OSError):
                pidfd = os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])
        return cls(pidfd)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
        if self.timer is not None:
            self.timer.cancel()


class Session(asyncio.Protocol):
    """Connection of one client after its first request."""

    transport: asyncio.Transport

    def __init__(self, server: ArenaServer, number: int, peer: Peer, role: Role) -> None:
        self.number = number
        self.peer = peer
        self.role = role
        self.client = Client()
        self._server = server
        self._frames = Frames(MAX_REQUEST_BYTES)
        self._pending: deque[tuple[Request, asyncio.Task[None] | None]] = deque()
        """Requests that wait for the tier, each with its look-up, and those behind them."""
        self._reads_replies = True
        self._wait: Wait | None = None
        self._until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for request in map(read_request, self._frames.split(data)):
                looking = self._server.look_up(request)
                if looking is not None:
                    looking.add_done_callback(self._serve_pending)
                if looking is not None or self._pending:
                    self._pending.append((request, looking))
                else:
                    self._receive(request)
        except BadMessage as error:
            self._fail(error)
        if len(self._pending) > MAX_PENDING:
            self.transport.pause_reading()

    def _serve_pending(self, _: "asyncio.Task[None]") -> None:
        """Answer requests in their order, up to the next that waits for the tier."""
        if self.transport.is_closing():
            return  # nothing may be pinned or begun for it any more
        try:
            while self._pending:
                request, looking = self._pending[0]
                if looking is not None and not looking.done():
                    break
                self._pending.popleft()
                self._receive(request)
        except BadMessage as error:
            self._fail(error)
            return
        if len(self._pending) <= MAX_PENDING and self._reads_replies:
            self.transport.resume_reading()

    def _fail(self, error: BadMessage) -> None:
        self._pending.clear()
        self.transport.write(encode(Failed(str(error))))
        self.transport.close()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._pending.clear()
        self._end_wait()
        self._server.lose(self)

    def pause_writing(self) -> None:
        self._reads_replies = False
        self.transport.pause_reading()  # it reads no replies: it gets no more of them

    def resume_writing(self) -> None:
        self._reads_replies = True
        if len(self._pending) <= MAX_PENDING:
            self.transport.resume_reading()

    def settle_wait(self) -> None:
        """Answer this client's wait if nothing that it waits for is pending, or after its time.

        Otherwise look again when the first of its claims may have ended.
        """
        if self._wait is None:
            return
        index, now_s = self._server.arena.index, self._server.clock()
        ends = [index.pending_until_s(digest, now_s) for digest in self._wait.digests]
        pending = [end_s for end_s in ends if end_s > now_s]
        if not pending or now_s >= self._until_s:
            self._end_wait()
            self.transport.write(encode(Done()))
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = min(self._until_s, *pending) - now_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.settle_wait)

    def _receive(self, request: Request) -> None:
        if self._wait is not None:
            raise BadMessage("a request while it waits")
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            raise BadMessage("it reads no replies")
        if not isinstance(request, Wait):
            if (reply := self._server.answer(self, request)) is not None:
                self.transport.write(encode(reply))
            return
        self._wait = request
        for digest in request.digests:
            self._server.waiting[digest].add(self)
        self._until_s = self._server.clock() + request.seconds
        self.settle_wait()

    def _end_wait(self) -> None:
        if self._wait is not None:
            for digest in self._wait.digests:
                self._server.waiting[digest].discard(self)
                if not self._server.waiting[digest]:
                    del self._server.waiting[digest]
            self._wait = None
        if self._timer is not None:
            self._timer.cancel()


def bind(path: Path, mode: int) -> socket.socket:
    """Return the socket of a path, as the only server of it. It refuses connections until `start`.

    The kernel checks the permissions of the socket and of its folder when a client connects. A
    socket that a killed server has left is replaced.

    Args:
        path: path of the socket; a file beside it is locked.
        mode: permissions of the socket, such as 0600.

    Raises:
        OSError: another server listens there, or the path cannot be used: it is another file, say.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EADDRINUSE, "another server listens there") from None
        if path.is_socket():
            path.unlink()
        listener.bind(str(path))
        path.chmod(mode)
    except OSError:
        listener.close()
        os.close(lock)
        raise
    weakref.finalize(listener, os.close, lock)
    return listener


async def _read_hello(connection: socket.socket) -> Hello:
    loop, frames = asyncio.get_running_loop(), Frames(MAX_HELLO_BYTES)
    while data := await loop.sock_recv(connection, MAX_HELLO_BYTES):
        for request in map(read_request, frames.split(data)):
            if not isinstance(request, Hello) or frames.begun:
                raise BadMessage("the first request is no Hello, or is not alone")
            return request
    raise BadMessage("no request")
