"""Where clients connect, with TLS or without."""

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from aiohttp import web

from epd.config import ProxyConfig
from epd.edge.protocol import Runner, Server

BACKLOG = 128
"""Connections that the kernel holds until they are accepted; aiohttp's default."""
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
        where = f"{config.host}:{config.port}"
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
        config: ProxyConfig,
    ) -> None:
        """Begin to accept: handshakes may take as long as heads."""
        self.sockets = sockets
        self._server = server
        self._tls = tls
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._begun = set[asyncio.Task[None]]()
        for listener in sockets:
            listener.setblocking(False)
            listener.listen(BACKLOG)
        self._accepting = [self._loop.create_task(self._accept(it)) for it in sockets]

    def close(self) -> None:
        """Accept no more. Handshakes that have begun go on."""
        for accepting in self._accepting:
            accepting.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    client, _ = await self._loop.sock_accept(listener)
                except OSError:  # no descriptor is left, or the client is gone
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                else:
                    self._begin(client)

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
                ssl_handshake_timeout=self._config.header_timeout_s,
            )


class Site(web.BaseSite):
    """Where clients connect. A TLS handshake has as long as a head, and not asyncio's 60 s."""

    def __init__(self, runner: Runner, tls: ssl.SSLContext | None, **where: Any) -> None:
        """Take what `loop.create_server` takes: `host` and `port`, or a `sock`."""
        super().__init__(runner, ssl_context=tls)
        self._where = where
        self._config = runner.config

    @property
    def name(self) -> str:
        """What aiohttp calls it."""
        return f"epd {self._where}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be listened on.
        """
        await super().start()
        loop, server = asyncio.get_running_loop(), cast("Server", self._runner.server)
        plain = self._ssl_context is None
        self._server = await loop.create_server(
            server, **self._where, backlog=self._backlog, start_serving=plain
        )
        if self._ssl_context is not None:
            bound, listeners = self._server, [it.dup() for it in self._server.sockets]
            accepting = Handshakes(server, listeners, self._ssl_context, self._config)
            self._server = cast("asyncio.AbstractServer", accepting)
            bound.close()
