"""Server of an arena for proxies of other hosts: look-ups, leases, claims and its use, over TCP.

It gives no memory and no descriptor, reads and writes no entry, and deletes none. The first message
has the server's key. What a proxy has claimed belongs to its connection, as on the Unix socket.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial

from msgspec import structs

from ec_store.access import is_key
from ec_store.arena.protocol import (
    AnyRequest,
    BadMessage,
    ClaimKeys,
    Find,
    GetStats,
    Hello,
    Register,
    Release,
    Reply,
    Stats,
    Welcome,
    encode,
)
from ec_store.arena.server import BACKLOG, HELLO_S, ArenaServer, Session, check_version

logger = logging.getLogger("vllm.ec_store")

MAX_CONNECTIONS = 256
"""Upper bound of the connections over TCP. One host may have half of them."""

MAX_HELLO_BYTES = 4096
"""Upper bound of the first request, so that a peer without the key takes little memory."""

MAX_REQUEST_BYTES = 2**18
"""Upper bound of a request: the digests of `MAX_KEYS` entries take 140 KB."""

KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Times in seconds and tries, after which a host that is gone without a word is disconnected."""

WARN_EVERY_S = 10.0
"""Shortest time in seconds between two warnings of refused connections."""

ACCEPT_AGAIN_S = 0.5
"""Time in seconds until the next connection is accepted after the process had no descriptor."""


class RemoteServer:
    """Listener over TCP, beside that of the Unix socket and on its event loop."""

    def __init__(
        self,
        server: ArenaServer,
        key: str,
        tls: ssl.SSLContext | None = None,
        *,
        max_connections: int = MAX_CONNECTIONS,
        hello_s: float = HELLO_S,
    ) -> None:
        """Create the listener.

        Args:
            server: the server with the index.
            key: key that the first request of each connection must have.
            tls: certificate of this server; None: connections are not encrypted.
            max_connections: as `MAX_CONNECTIONS`.
            hello_s: time in seconds for the handshake of TLS, and then for the first request.
        """
        self._server = server
        self._key = key
        self._tls = tls
        self._max_connections = max_connections
        self.hello_s = hello_s
        self._sessions: dict[Session, str] = {}
        """Host of each connection, from its beginning: before its handshake and its key."""
        self._of_host: Counter[str] = Counter()
        self._opening: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._warn_again_s = 0.0

    def start(self, listener: socket.socket) -> None:
        """Accept connections of a bound socket, which `close` closes."""
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        """Stop listening and disconnect all proxies, which ends their claims."""
        tasks = [task for task in (self._accepting, *self._opening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in list(self._sessions):
            session.transport.abort()
        while self._sessions:  # noqa: ASYNC110 - one or two turns of the loop
            await asyncio.sleep(0)

    def add(self, session: Session) -> None:
        """Begin a connection, which was counted when it was accepted."""

    def welcome(self, session: Session, hello: Hello) -> None:
        """Answer the first request of a connection.

        Raises:
            BadMessage: it has another key or version, or asks for memory.
        """
        if not is_key(self._key, hello.key):
            self._warn(
                "the arena refuses a proxy at %s: its key is another one", self._sessions[session]
            )
            raise BadMessage("the key is not the server's: set the same EC_STORE_API_KEY in both")
        check_version(hello)
        if hello.role != "proxy":
            raise BadMessage(f"over TCP there is no {hello.role}: the memory is for its own host")
        session.client.role = hello.role
        session.frames.max_bytes = MAX_REQUEST_BYTES
        self._server.arena.clients[session.number] = session.client
        session.transport.write(encode(Welcome(self._server.name, 0, 0, 0)))

    def answer(
        self, session: Session, request: AnyRequest, claimed_elsewhere: Collection[bytes] = ()
    ) -> Reply | None:
        """Return the reply to a request.

        Raises:
            BadMessage: a proxy of another host may not send it.
        """
        if not _is_permitted(request):
            raise BadMessage(f"over TCP there is no {type(request).__name__}")
        reply = self._server.answer(session, request, claimed_elsewhere)
        if isinstance(reply, Stats):  # the processes of this host concern no other
            return structs.replace(reply, memory=replace(reply.memory, uses=[]))
        return reply

    def answer_hits(self, session: Session, request: AnyRequest) -> Reply | None:
        return self._server.answer_hits(session, request)

    def look_up(self, request: AnyRequest) -> "asyncio.Task[frozenset[bytes]] | None":
        return self._server.look_up(request) if _is_permitted(request) else None

    def lose(self, session: Session) -> None:
        """Take back what a proxy held."""
        arena = self._server.arena
        arena.clients.pop(session.number, None)
        arena.index.disconnect(session.client)
        self._leave(session)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections and count them, so that handshakes have a limit too."""
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, address = await loop.sock_accept(listener)
                except OSError as error:
                    self._warn("the arena accepts no connection over TCP: %s", error)
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                host = str(address[0])
                most = self._max_connections
                if len(self._sessions) >= most or self._of_host[host] >= most // 2:
                    connection.close()
                    self._warn(
                        "the arena refuses a connection of %s: %d of %d connections over TCP are "
                        "in use, %d of them by that host, which may have half",
                        host,
                        len(self._sessions),
                        most,
                        self._of_host[host],
                    )
                    continue
                session = Session(self, MAX_HELLO_BYTES)
                self._sessions[session] = host
                self._of_host[host] += 1
                opening = asyncio.create_task(self._open(session, connection))
                self._opening.add(opening)
                opening.add_done_callback(partial(self._opened, session, connection))

    async def _open(self, session: Session, connection: socket.socket) -> None:
        """Make the handshake, if there is one, and give the connection to its session."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: session,
            connection,
            ssl=self._tls,
            ssl_handshake_timeout=self.hello_s if self._tls is not None else None,
        )

    def _opened(
        self, session: Session, connection: socket.socket, opening: "asyncio.Task[None]"
    ) -> None:
        """End a connection that could not be opened, or was cancelled before that."""
        self._opening.discard(opening)
        error = None if opening.cancelled() else opening.exception()
        if error is not None or opening.cancelled():
            connection.close()
            self._leave(session)
        if error is not None:
            self._warn("the arena ends a connection over TCP before its first message: %s", error)

    def _leave(self, session: Session) -> None:
        if (host := self._sessions.pop(session, None)) is not None:
            self._of_host[host] -= 1
            if not self._of_host[host]:
                del self._of_host[host]

    def _warn(self, text: str, *arguments: object) -> None:
        """Log a warning unless another was logged a moment ago: strangers may cause many."""
        now_s = time.monotonic()
        if now_s >= self._warn_again_s:
            self._warn_again_s = now_s + WARN_EVERY_S
            logger.warning(text, *arguments)


def _is_permitted(request: AnyRequest) -> bool:
    match request:
        case Find() | ClaimKeys() | Release() | Register(model=b"") | GetStats():
            return True
    return False


def bind_tcp(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Raise OSError if it cannot be."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        with suppress(OSError):  # only of IPv6: "::" is for both
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
