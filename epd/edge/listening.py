"""Listening sockets for clients, with TLS or without."""

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

from epd.background import Background
from epd.config import ProxyConfig
from epd.config.live import LiveConfig
from epd.edge import aiohttp_private
from epd.edge.protocol import Runner, Server

BACKLOG = 65535
"""Connections that the kernel holds until the event loop accepts them, per listening socket. Linux
lowers it to `net.core.somaxconn`, which `epd doctor` checks. Beyond it, the kernel drops the
packets of further clients, which send them again after 1 s."""
ACCEPT_AGAIN_S = 0.5
"""Delay after a failed accept, in seconds."""


class CannotListen(Exception):
    """Error: the configured address cannot be listened on."""


@contextmanager
def binding(config: ProxyConfig) -> Iterator[None]:
    """Convert errors of binding sockets to the configured address.

    Raises:
        CannotListen: the operating system rejects the address.
    """
    try:
        yield
    except OSError as error:
        where = f"{config.host}:{config.port}" if config.uds is None else str(config.uds)
        raise CannotListen(f"cannot listen on {where}: {error.strerror or error}") from error


class Handshakes:
    """Server that accepts TLS connections and limits the number of unfinished handshakes.

    asyncio's own server reports a connection only after its handshake, and accepts any number.

    Attributes:
        sockets: listening sockets.
    """

    def __init__(
        self,
        server: Server,
        sockets: Sequence[socket.socket],
        tls: ssl.SSLContext,
        live: LiveConfig,
        background: Background,
    ) -> None:
        """Begin to accept. A handshake may take `header_timeout_s`, as a request's head may.

        Args:
            server: factory of a connection's protocol.
            sockets: listening sockets.
            tls: TLS context for clients.
            live: configuration with the limits of connections.
            background: runner of the tasks that accept.
        """
        self.sockets = sockets
        self._server = server
        self._tls = tls
        self._live = live
        self._background = background
        self._loop = asyncio.get_running_loop()
        self._begun = set[asyncio.Task[None]]()
        for listener in sockets:
            listener.setblocking(False)
            listener.listen(BACKLOG)
        self._accepting = [self._loop.create_task(self._listen(it)) for it in sockets]

    def close(self) -> None:
        """Stop accepting. Handshakes that have begun continue."""
        for accepting in self._accepting:
            accepting.cancel()

    async def _listen(self, listener: socket.socket) -> None:
        with listener:
            await self._background.keep("tls_accept", partial(self._accept, listener))

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(listener)
            except OSError:  # out of descriptors, or the client disconnected
                await asyncio.sleep(ACCEPT_AGAIN_S)
            else:
                try:
                    self._begin(client)
                except BaseException:
                    client.close()
                    raise

    def _begin(self, client: socket.socket) -> None:
        if not self._server.has_room(len(self._begun)):
            client.close()
            return
        shaking = self._loop.create_task(self._shake(client))
        self._begun.add(shaking)
        shaking.add_done_callback(self._begun.discard)

    async def _shake(self, client: socket.socket) -> None:
        with suppress(OSError):  # the handshake failed; the loop has closed the socket
            await self._loop.connect_accepted_socket(
                self._server,
                client,
                ssl=self._tls,
                ssl_handshake_timeout=self._live.current.header_timeout_s,
            )


class Site(aiohttp_private.BaseSite):
    """Listening address. A TLS handshake may take `header_timeout_s` instead of asyncio's 60 s."""

    def __init__(
        self, runner: Runner, tls: ssl.SSLContext | None, background: Background, **where: Any
    ) -> None:
        """Set the address, as for `loop.create_server`.

        Args:
            runner: runner of the application.
            tls: TLS context for clients; None for plain HTTP.
            background: runner of the tasks that accept TLS connections.
            where: `host` and `port`, or `sock`, which may be a Unix socket.
        """
        super().__init__(runner)
        self._factory = cast("Server", runner.server)
        self._tls = tls
        self._background = background
        self._where = where
        self._live = runner.live

    @property
    def name(self) -> str:
        return f"epd {self._where}"

    @property
    def _is_unix(self) -> bool:
        listener = self._where.get("sock")
        return listener is not None and listener.family == socket.AF_UNIX

    async def listen(self) -> asyncio.AbstractServer:
        """Listen on the address; with TLS by `Handshakes`."""
        loop = asyncio.get_running_loop()
        create: Any = loop.create_unix_server if self._is_unix else loop.create_server
        bound: asyncio.Server = await create(
            self._factory, **self._where, backlog=BACKLOG, start_serving=self._tls is None
        )
        if self._tls is None:
            return bound
        listeners = [it.dup() for it in bound.sockets]
        accepting = Handshakes(self._factory, listeners, self._tls, self._live, self._background)
        bound.close()
        return cast("asyncio.AbstractServer", accepting)
