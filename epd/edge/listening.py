"""Listening sockets for clients: TCP or Unix, with TLS or without."""

import asyncio
import errno
import fcntl
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog

from epd.aio import Background
from epd.config.sections import ConfigFields
from epd.config.sections.limits import LimitSettings
from epd.config.sections.serving import ServingSettings
from epd.edge import aiohttp_private
from epd.edge.protocol import EdgeServer, Runner
from epd.http.tls import load_certificate, trust_cas

BACKLOG = 65535
"""Connections that the kernel holds until the event loop accepts them, per listening socket. Linux
lowers it to `net.core.somaxconn`, which `epd doctor` checks. Beyond it, the kernel drops the
packets of further clients, which send them again after 1 s."""
ACCEPT_AGAIN_S = 0.5
"""Delay after a failed accept, in seconds."""

_LACKING = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors of an address of a host that this machine lacks, such as `::1` without IPv6. They matter
only where the host has no other address."""

Sockets = tuple[socket.socket, ...]
Address = tuple[Any, ...]
"""Address for the socket functions: host, port, and for IPv6 flow and scope."""


@contextmanager
def listening_at(path: Path, backlog: int = BACKLOG) -> Iterator[socket.socket]:
    """Return a socket that listens at a path; the end of the context removes its file.

    A stale socket file, on which no process listens, is replaced. The umask sets the mode of the
    new file: a client needs write permission.

    Raises:
        OSError: a process listens at the path, the file is not a socket, or it cannot be created.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with _lock_folder(path.parent):
            _remove_stale(path)
            listener.bind(str(path))
            status = path.stat()
            # Within the lock: another process would find a file without a listener stale.
            listener.listen(backlog)
        try:
            yield listener
        finally:
            _remove(path, status)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no other process replaces a socket in it meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "the file is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # a process listens, and its backlog is full
            pass
    raise OSError(errno.EADDRINUSE, "another process listens on it")


def _remove(path: Path, status: os.stat_result) -> None:
    """Remove the file, unless another process has replaced it."""
    with suppress(FileNotFoundError):
        now = path.lstat()
        if (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino):
            path.unlink()


def server_context(config: ServingSettings) -> ssl.SSLContext | None:
    """Return the TLS context for clients; None for plain HTTP.

    Raises:
        TlsInvalid: a file cannot be read, is not PEM, or the key does not match the certificate.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, config.ssl_certfile, config.ssl_keyfile)
    if config.ssl_ca_certs is not None:
        trust_cas(context, "--ssl-ca-certs", config.ssl_ca_certs)
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def reload_certificate(context: ssl.SSLContext, config: ServingSettings) -> None:
    """Reload certificate and key into the context, for new connections.

    Raises:
        TlsInvalid: certificate or key is invalid. The context is unchanged.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    # Check in a new context first: a failed load removes the old key from a context.
    load_certificate(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl_certfile, config.ssl_keyfile
    )
    load_certificate(context, config.ssl_certfile, config.ssl_keyfile)


class CannotListen(Exception):
    """Error: the configured address cannot be listened on."""


@contextmanager
def binding_errors(config: ServingSettings) -> Iterator[None]:
    """Convert errors of binding sockets to the configured address.

    Raises:
        CannotListen: the operating system rejects the address.
    """
    try:
        yield
    except OSError as error:
        where = f"{config.host}:{config.port}" if config.uds is None else str(config.uds)
        raise CannotListen(f"cannot listen on {where}: {error.strerror or error}") from error


@contextmanager
def bound_sockets(config: ConfigFields) -> Iterator[list[Sockets]]:
    """Yield sockets on one port: for each worker, one per address of the host.

    All workers share one Unix socket, which has no `SO_REUSEPORT` and listens already.

    Raises:
        CannotListen: the address cannot be bound.
    """
    with ExitStack() as stack:
        with binding_errors(config):
            if config.uds is None:
                groups = _bound_to_one_port(config, stack)
            else:
                shared = stack.enter_context(listening_at(config.uds))
                groups = [(shared,)] * config.workers
        yield groups


def _bound_to_one_port(config: ConfigFields, stack: ExitStack) -> list[Sockets]:
    port, by_address, lacking = config.port, list[Sockets](), None
    for family, (host, _, *scope) in _addresses(config.host):
        # The first socket is bound without SO_REUSEPORT: bind fails if another process listens.
        try:
            first = stack.enter_context(_bound(family, (host, port, *scope)))
        except OSError as error:
            if error.errno not in _LACKING:
                raise
            lacking = error
            continue
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, config.workers > 1)
        bound = first.getsockname()
        port = bound[1]
        others = [
            stack.enter_context(_bound(family, bound, shared=True))
            for _ in range(config.workers - 1)
        ]
        by_address.append((first, *others))
    if lacking is not None and not by_address:
        raise lacking
    return list(zip(*by_address, strict=True))


def _addresses(host: str) -> list[tuple[int, Address]]:
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, *_, address in found))


def _bound(family: int, address: Address, *, shared: bool = False) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        if family == socket.AF_INET6:  # 0.0.0.0 has a socket of its own
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
    except BaseException:
        opened.close()
        raise
    return opened


def log_listening(config: ConfigFields, address: Any, **more: object) -> None:
    """Log that a socket listens at this address, by its URL for clients."""
    if config.uds is not None:
        url = f"unix:{config.uds}"
    else:
        host, port, *_ = address
        url = f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{port}"
    structlog.get_logger("epd").info("listening", url=url, **more)


class Handshakes:
    """Server that accepts TLS connections and limits the number of unfinished handshakes.

    asyncio's own server reports a connection only after its handshake, and accepts any number.
    """

    def __init__(
        self,
        server: EdgeServer,
        listener: socket.socket,
        tls: ssl.SSLContext,
        config: LimitSettings,
        background: Background,
    ) -> None:
        """Begin to accept. A handshake may take `header_timeout_s`, as a request's head may."""
        self.sockets = (listener,)  # aiohttp reads their addresses
        self._server = server
        self._tls = tls
        self._config = config
        self._background = background
        self._loop = asyncio.get_running_loop()
        self._begun = set[asyncio.Task[None]]()
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accepting = self._loop.create_task(self._listen(listener))

    def close(self) -> None:
        """Stop accepting. Handshakes that have begun continue."""
        self._accepting.cancel()

    async def _listen(self, listener: socket.socket) -> None:
        with listener:
            await self._background.keep_running("tls_accept", partial(self._accept, listener))

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(listener)
            except OSError:  # out of descriptors, or the client disconnected
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            try:
                self._begin(client)
            except BaseException:
                client.close()
                raise

    def _begin(self, client: socket.socket) -> None:
        if not self._server.has_room(len(self._begun)):
            client.close()
            return
        shaking = self._loop.create_task(self._handshake(client))
        self._begun.add(shaking)
        shaking.add_done_callback(self._begun.discard)

    async def _handshake(self, client: socket.socket) -> None:
        with suppress(OSError):  # the handshake failed; the loop has closed the socket
            await self._loop.connect_accepted_socket(
                self._server,
                client,
                ssl=self._tls,
                ssl_handshake_timeout=self._config.header_timeout_s,
            )


class Site(aiohttp_private.BaseSite):
    """Listening address. A TLS handshake may take `header_timeout_s` instead of asyncio's 60 s."""

    def __init__(
        self,
        runner: Runner,
        tls: ssl.SSLContext | None,
        background: Background,
        listener: socket.socket,
    ) -> None:
        """Accept clients at a bound socket, which the end of the site closes."""
        super().__init__(runner)
        self._factory = cast("EdgeServer", runner.server)
        self._tls = tls
        self._background = background
        self._listener = listener
        self._config = runner.config

    @property
    def name(self) -> str:
        return f"epd {self._listener.getsockname()}"

    async def listen(self) -> asyncio.AbstractServer:
        if self._tls is not None:
            accepting = Handshakes(
                self._factory, self._listener, self._tls, self._config, self._background
            )
            return cast("asyncio.AbstractServer", accepting)
        loop = asyncio.get_running_loop()
        is_unix = self._listener.family == socket.AF_UNIX
        create: Any = loop.create_unix_server if is_unix else loop.create_server
        opened: asyncio.Server = await create(self._factory, sock=self._listener, backlog=BACKLOG)
        return opened
