"""Server of an arena, on a Unix socket. No byte of an entry passes through it.

What a client holds belongs to its connection. If a client closes it in the middle of copies, or
ends, what it had pinned or begun stays until the process is gone: a device may still be copying.
"""

import asyncio
import logging
import os
import resource
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, cast

from ec_store.arena.arena import Arena
from ec_store.arena.checksums import Checksums
from ec_store.arena.index import ArenaIndex, Client
from ec_store.arena.memory import ArenaMemory, map_memory
from ec_store.arena.peers import Peer
from ec_store.arena.protocol import (
    MAX_REQUEST_BYTES,
    VERSION,
    AnyRequest,
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
    Headers,
    Hello,
    Purge,
    Read,
    Release,
    Reply,
    Welcome,
    encode,
    read_request,
)
from ec_store.arena.tier import Tier, TierLimits
from ec_store.arena.tier_chain import TierChain

logger = logging.getLogger("vllm.ec_store")

HELLO_S = 5.0
"""Time in seconds in which a new connection must send its first request."""

LAST_REPLY_S = 5.0
"""Time in seconds that a client has to read why it is disconnected."""

GONE_S = 60.0
"""Time in seconds after which the copies of a client that is gone are taken to have ended, if the
kernel gives no descriptor of its process: before Linux 6.5 (`SO_PEERPIDFD`), and in another PID
namespace."""

EXPIRE_EVERY_S = 10.0
BACKLOG = 128

MAX_CONNECTIONS = 2048
"""Upper bound of the connections, with those that have ended and still keep bytes. One user may
have half of them."""

MAX_REFUSED = 32
"""Connections above a maximum that wait for their reason. Further ones are closed at once."""

DESCRIPTORS_EACH = 2
"""Descriptors of a connection: its socket, and its process."""

OTHER_DESCRIPTORS = 256
"""Descriptors that are left to the process for everything else, such as its HTTP connections."""

MAX_UNREAD_BYTES = 2**20
"""Bytes of replies that a client has not read above which its requests wait. One read may deliver
thousands of requests, so a pause of reading does not bound the replies."""

MAX_PENDING = 64
"""Requests of a client that wait above which no more are read."""

NEEDS_MEMORY: Mapping[str, tuple[type, ...]] = {"proxy": (Read, Begin), "reader": (Begin,)}
"""Requests for which the memory of a client is missing, by its role: but for an entry without
payload, as the proxies write for clients' names of media."""

LOOK_UPS = (Find, Read, ClaimKeys)
"""Requests for which the tiers are asked for what the memory lacks."""

CHANGES = (End, Delete, Purge, Release)
"""Requests of which the tiers are told afterwards."""


class SessionServer(Protocol):
    """Part of a server that its sessions use. `hello_s` is as `HELLO_S`."""

    hello_s: float

    def add(self, session: "Session") -> None: ...
    def welcome(self, session: "Session", hello: Hello) -> None: ...
    def answer(
        self,
        session: "Session",
        request: AnyRequest,
        claimed_elsewhere: Collection[bytes] = (),
    ) -> Reply | None: ...
    def answer_hits(self, session: "Session", request: AnyRequest) -> Reply | None: ...
    def look_up(self, request: AnyRequest) -> "asyncio.Task[frozenset[bytes]] | None": ...
    def lose(self, session: "Session") -> None: ...


def check_version(hello: Hello) -> None:
    """Raise BadMessage if a client speaks another version than this server."""
    if hello.version != VERSION:
        raise BadMessage(
            f"the server of the arena speaks version {VERSION} of its protocol, this client "
            f"version {hello.version}: run one release of ec_store in both"
        )


class ArenaServer:
    """Listener of an arena, on one event loop.

    Attributes:
        name: random name of the memory.
    """

    def __init__(  # noqa: PLR0913 - all but two by name
        self,
        memory: ArenaMemory,
        index: ArenaIndex,
        *,
        address: str = "",
        tier_name: str = "",
        max_connections: int = MAX_CONNECTIONS,
        hello_s: float = HELLO_S,
        gone_s: float = GONE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the server.

        Args:
            memory: the memory, the descriptor of which the server closes.
            index: index of its entries.
            address: URL by which proxies of other hosts reach the server; empty: they do not.
            tier_name: digest of the shared tier's URL; empty: there is none.
            max_connections: as `MAX_CONNECTIONS`.
            hello_s: as `HELLO_S`.
            gone_s: as `GONE_S`.
            clock: monotonic clock in seconds.
        """
        self.arena = Arena(index, memory.size_bytes, memory.pages)
        self.clock = clock
        self._max_connections = max_connections
        self.hello_s = hello_s
        self._gone_s = gone_s
        self._memory = memory
        self.name = secrets.token_bytes(16)
        self._address, self._tier_name = address, tier_name
        self._read_only = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._sessions: dict[int, tuple[Session, Peer]] = {}
        self._connections: Counter[int] = Counter()
        """Number of connections of each user, with those that have ended and still keep bytes."""
        self._gone: dict[int, Peer] = {}
        self._checksums = Checksums(index, map_memory(memory.fd, memory.size_bytes, write=False))
        self._tiers: TierChain | None = None
        self._listening: asyncio.AbstractServer | None = None
        self._expiry: asyncio.TimerHandle | None = None

    async def start(
        self,
        listener: socket.socket,
        tiers: Mapping[str, Tier] | None = None,
        tier_limits: TierLimits | None = None,
    ) -> None:
        """Accept connections of a socket from `bind`. The server closes it, and the tiers."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_unix_server(
            lambda: Session(self), sock=listener, backlog=BACKLOG
        )
        self._expire()
        self._checksums.start()
        if tiers:
            memory = map_memory(self._memory.fd, self._memory.size_bytes, write=True)
            limits = tier_limits or TierLimits()
            self._tiers = TierChain(tiers, self.arena, memory, self.clock, limits)
            self._tiers.start()

    async def close(self) -> None:
        """Stop listening and disconnect all clients. Their memory stays mapped in them."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        for session, _ in list(self._sessions.values()):
            session.transport.abort()
        while self._sessions:  # noqa: ASYNC110 - one or two turns of the loop
            await asyncio.sleep(0)
        await self._checksums.close()
        if self._tiers is not None:
            await self._tiers.close()
        for number in list(self._gone):
            self._forget(number)
        os.close(self._read_only)
        os.close(self._memory.fd)

    def answer(
        self, session: "Session", request: AnyRequest, claimed_elsewhere: Collection[bytes] = ()
    ) -> Reply | None:
        """Return the reply to a request, and begin the work that follows from it.

        Keys of `claimed_elsewhere` are claimed by owners on other hosts.
        """
        if isinstance(request, Forget):
            self._forget_earlier(request.session)
            return Done()
        needless = isinstance(request, Begin) and not request.size_bytes
        client = session.client
        if isinstance(request, NEEDS_MEMORY.get(client.role, ())) and not needless:
            raise BadMessage(f"a {client.role} sends no {type(request).__name__}")
        written = client.writes.get(request.number) if isinstance(request, End) else None
        reply = self.arena.answer(client, request, self.clock(), claimed_elsewhere)
        if self._tiers is not None and isinstance(request, CHANGES):
            match request:
                case End() if written is not None and reply == Done(1):
                    self._tiers.offer_new(written)
                case Delete(digests):
                    self._tiers.remove(digests)
                case Purge(namespace):
                    self._tiers.purge(namespace)
                case Release(digests, owner):
                    self._tiers.release(digests, owner)
        return reply

    def answer_hits(self, session: "Session", request: AnyRequest) -> Reply | None:
        """Return the reply to a look-up of which the memory has all; None: `look_up` it first."""
        if self._tiers is None or not isinstance(request, Find):
            return None
        reply = self.answer(session, request)
        return reply if isinstance(reply, Headers) and all(reply.headers) else None

    def look_up(self, request: AnyRequest) -> "asyncio.Task[frozenset[bytes]] | None":
        """Look up in the tiers what a request asks for and the memory lacks.

        Return a task that ends soon, after which the request is answered; None: at once. Its result
        are the keys that owners on other hosts have claimed.
        """
        if self._tiers is None or not isinstance(request, LOOK_UPS):
            return None
        if isinstance(request, Find) and request.local:
            return None
        return self._tiers.look_up(request)

    def add(self, session: "Session") -> None:
        """Add a connection, which must send a `Hello` first; above a maximum, that is refused."""
        try:
            peer = Peer.of(session.transport.get_extra_info("socket"))
        except OSError as error:
            logger.warning("the arena closes a new connection: %s", error)
            session.transport.abort()
            return
        total, of_user = self._connections.total(), self._connections[peer.uid]
        most = self._max_connections
        if self._listening is None or max(total - most, of_user - most // 2) >= MAX_REFUSED:
            peer.close()
            session.transport.abort()
            return
        if total >= most:
            session.refusal = f"the arena has {most} connections, which is the maximum"
        elif of_user >= most // 2:
            session.refusal = (
                f"user {peer.uid} has {most // 2} connections to the arena, which is the maximum "
                "of a user"
            )
        self._connections[peer.uid] += 1
        session.client.pid = peer.pid
        self._sessions[session.number] = session, peer

    def welcome(self, session: "Session", hello: Hello) -> None:
        """Answer the first request of a connection, with the memory's descriptor.

        Raises:
            OSError: the client is gone.
            BadMessage: it is refused, or speaks another version.
        """
        memory = self._memory
        if session.refusal:
            raise BadMessage(session.refusal)
        check_version(hello)
        welcome = Welcome(
            self.name,
            session.number,
            memory.size_bytes,
            memory.segment_bytes,
            self._address,
            self._tier_name,
        )
        memories = {"proxy": [], "reader": [self._read_only], "writer": [memory.fd]}
        fd = session.transport.get_extra_info("socket").fileno()
        with socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            socket.send_fds(connection, [encode(welcome)], memories[hello.role])
        session.client.role = hello.role
        self.arena.clients[session.number] = session.client

    def lose(self, session: "Session") -> None:
        """Take back what a client held, now or when its process is gone."""
        number, client = session.number, session.client
        if number not in self._sessions:  # it was closed at once
            return
        _, peer = self._sessions.pop(number)
        self.arena.clients.pop(number, None)
        self.arena.index.disconnect(client)
        if client.role == "proxy":  # it has no memory, so nothing is still being copied
            self.arena.index.forget(client, self.clock())
        if not client.pins and not client.writes:
            self._drop(peer)
        else:
            self.arena.gone[number] = client
            self._gone[number] = peer
            loop = asyncio.get_running_loop()
            if peer.pidfd is None:
                peer.timer = loop.call_later(self._gone_s, self._forget, number)
            else:
                loop.add_reader(peer.pidfd, self._forget, number)

    def _forget_earlier(self, number: int) -> None:
        """Forget a connection of a client that has lost it, and alone knows its number."""
        if number in self._gone:
            self._forget(number)
        elif number in self._sessions:
            earlier, _ = self._sessions[number]
            earlier.transport.abort()  # the end of its connection has not been read yet
            self.arena.index.disconnect(earlier.client)
            self.arena.index.forget(earlier.client, self.clock())

    def _forget(self, number: int) -> None:
        peer = self._gone.pop(number)
        if peer.pidfd is not None:
            asyncio.get_running_loop().remove_reader(peer.pidfd)
        self._drop(peer)
        self.arena.index.forget(self.arena.gone.pop(number), self.clock())

    def _expire(self) -> None:
        self.arena.index.expire(self.clock())
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(EXPIRE_EVERY_S, self._expire)

    def _drop(self, peer: Peer) -> None:
        peer.close()
        self._connections[peer.uid] -= 1
        if not self._connections[peer.uid]:
            del self._connections[peer.uid]


class Session(asyncio.Protocol):
    """Connection of one client.

    Attributes:
        number: random number that no other client knows.
        client: what it holds; without a role before its first request.
        frames: splitter of its bytes into requests.
        refusal: reason for which its first request is refused; empty: it is not.
    """

    transport: asyncio.Transport
    _timer: asyncio.TimerHandle

    def __init__(self, server: SessionServer, max_request_bytes: int = MAX_REQUEST_BYTES) -> None:
        self.number = secrets.randbits(62)
        self.refusal = ""
        self.client = Client()
        self._server = server
        self.frames = Frames(max_request_bytes)
        self._pending: deque[tuple[AnyRequest, asyncio.Task[frozenset[bytes]] | None]] = deque()
        """Requests that wait for the tiers, each with its look-up, or until the client reads its
        replies, and those behind them."""
        self._has_unread = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(MAX_UNREAD_BYTES)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._server.hello_s, self.transport.abort)
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for request in map(read_request, self.frames.split(data)):
                if self._answer_hits(request):
                    continue
                looking = self._server.look_up(request) if self.client.role else None
                if looking is not None:
                    looking.add_done_callback(lambda _: self._serve_pending())
                if looking is not None or self._pending or self._has_unread:
                    self._pending.append((request, looking))
                else:
                    self._receive(request)
        except (BadMessage, OSError) as error:
            self._fail(error)
        if len(self._pending) > MAX_PENDING:
            self.transport.pause_reading()

    def _answer_hits(self, request: AnyRequest) -> bool:
        """Answer a look-up of which the memory has all, the most frequent request, at once."""
        if self._pending or self._has_unread or not self.client.role:
            return False
        reply = self._server.answer_hits(self, request)
        if reply is None:
            return False
        self.transport.write(encode(reply))
        return True

    def _serve_pending(self) -> None:
        """Answer requests in their order, up to the next that waits."""
        if self.transport.is_closing():
            return  # nothing may be pinned or begun for it any more
        try:
            while self._pending and not self._has_unread:
                request, looking = self._pending[0]
                if looking is not None and not looking.done():
                    break
                self._pending.popleft()
                self._receive(request, () if looking is None else looking.result())
        except BadMessage as error:
            self._fail(error)
            return
        if len(self._pending) <= MAX_PENDING and not self._has_unread:
            self.transport.resume_reading()

    def _fail(self, error: Exception) -> None:
        """Tell the client why its connection ends."""
        self._pending.clear()
        self.transport.write(encode(Failed(str(error))))
        self.transport.close()
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LAST_REPLY_S, self.transport.abort)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._pending.clear()
        self._timer.cancel()
        self._server.lose(self)

    def pause_writing(self) -> None:
        self._has_unread = True
        self.transport.pause_reading()  # it reads no replies: it gets no more of them

    def resume_writing(self) -> None:
        self._has_unread = False
        self._serve_pending()

    def _receive(self, request: AnyRequest, claimed_elsewhere: Collection[bytes] = ()) -> None:
        if self.client.role:
            reply = self._server.answer(self, request, claimed_elsewhere)
            if reply is not None:
                self.transport.write(encode(reply))
        elif isinstance(request, Hello):
            self._server.welcome(self, request)
            self._timer.cancel()
        else:
            raise BadMessage("the first request is no Hello")


def raise_open_files() -> int:
    """Raise this process's limit of open files; return how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OTHER_DESCRIPTORS + DESCRIPTORS_EACH * MAX_CONNECTIONS
    most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(0, most - OTHER_DESCRIPTORS) // DESCRIPTORS_EACH
