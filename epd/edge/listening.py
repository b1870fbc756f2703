"""Where clients connect, with TLS or without."""

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

from aiohttp import web

from epd.background import Background
from epd.config import ProxyConfig
from epd.config.live import LiveConfig
from epd.edge.protocol import Runner, Server

BACKLOG = 65535
"""Connections that the kernel holds until the event loop accepts them, per listening socket. Linux
lowers it to `net.core.somaxconn`, which `epd doctor` looks at. Beyond it, the kernel drops the
packets of further clients, which send them again after 1 s."""
ACCEPT_AGAIN_S = 0.5
"""After a connection could not be accepted."""


class CannotListen(Exception):
    """Clients cannot connect where they should."""


@contextmanager
def binding(config: ProxyConfig) -> Iterator[None]:
    """While sockets are bound to the configured address.

    Raises:
        CannotListen: the operating system refuses one.
    """
    try:
        yield
    except OSError as error:
        where = f"{config.host}:{config.port}" if config.uds is None else str(config.uds)
        raise CannotListen(f"cannot listen on {where}: {error.strerror or error}") from error


class Handshakes:
    """Accepts TLS connections, and counts those whose handshake has not ended.

    A loop's own server says nothing of a connection before that, and takes as many as come.

    Attributes:
        sockets: what it listens on.
    """

    def __init__(
        self,
        server: Server,
        sockets: Sequence[socket.socket],
        tls: ssl.SSLContext,
        live: LiveConfig,
        background: Background,
    ) -> None:
        """Begin to accept: handshakes may take as long as heads.

        Args:
            server: makes a connection's protocol.
            sockets: what it listens on.
            tls: the context that clients are served with.
            live: says what connections are limited by.
            background: runs the loops that accept.
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
        """Accept no more. Handshakes that have begun go on."""
        for accepting in self._accepting:
            accepting.cancel()

    async def _listen(self, listener: socket.socket) -> None:
        with listener:
            await self._background.keep("tls_accept", partial(self._accept, listener))

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(listener)
            except OSError:  # no descriptor is left, or the client is gone
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
        with suppress(OSError):  # what is wrong with a handshake; the loop has closed it
            await self._loop.connect_accepted_socket(
                self._server,
                client,
                ssl=self._tls,
                ssl_handshake_timeout=self._live.current.header_timeout_s,
            )


class Site(web.BaseSite):
    """Where clients connect. A TLS handshake has as long as a head, and not asyncio's 60 s."""

    def __init__(
        self, runner: Runner, tls: ssl.SSLContext | None, background: Background, **where: Any
    ) -> None:
        """Take what `loop.create_server` takes: `host` and `port`, or a `sock`, a Unix one too."""
        super().__init__(runner, ssl_context=tls)
        self._background = background
        self._where = where
        self._live = runner.live

    @property
    def name(self) -> str:
        """What aiohttp calls it."""
        return f"epd {self._where}"

    @property
    def _is_unix(self) -> bool:
        listener = self._where.get("sock")
        return listener is not None and listener.family == socket.AF_UNIX

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be listened on.
        """
        await super().start()
        loop, server = asyncio.get_running_loop(), cast("Server", self._runner.server)
        plain = self._ssl_context is None
        create: Any = loop.create_unix_server if self._is_unix else loop.create_server
        bound: asyncio.Server = await create(
            server, **self._where, backlog=BACKLOG, start_serving=plain
        )
        self._server = bound
        if self._ssl_context is not None:
            listeners = [it.dup() for it in bound.sockets]
            accepting = Handshakes(
                server, listeners, self._ssl_context, self._live, self._background
            )
            self._server = cast("asyncio.AbstractServer", accepting)
            bound.close()
