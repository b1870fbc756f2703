"""Listening socket that a test controls, and ways to end a connection that servers do not offer."""

import asyncio
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

NO_LINGER = struct.pack("ii", 1, 0)


class Listener:
    """Server on 127.0.0.1 that handles each TCP connection in a task.

    Attributes:
        port: its port.
        accepting: whether connections are served; otherwise they wait, connected by the kernel and
            unanswered, as with a stuck server. May be set from another thread.
        connections: number of connections served so far.
    """

    def __init__(self, serve: Callable[[socket.socket], Awaitable[None]], port: int = 0) -> None:
        self._serve = serve
        self._socket = socket.create_server(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}
        self.port: int = self._socket.getsockname()[1]
        self.accepting = True
        self.connections = 0

    @property
    def open(self) -> int:
        """Return the number of connections that are being served."""
        return len(self._tasks)

    def reset_all(self) -> None:
        for task, connection in self._tasks.items():
            linger_not(connection)
            task.cancel()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accept connections for the duration of the context; then close those that remain."""
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(self._accept(group))
            try:
                yield
            finally:
                for task in (accepting, *self._tasks):
                    task.cancel()
                self._socket.close()

    async def _accept(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._socket)
            task = group.create_task(self._served(connection))
            self._tasks[task] = connection
            task.add_done_callback(self._tasks.pop)

    async def _served(self, connection: socket.socket) -> None:
        with connection:
            while not self.accepting:  # noqa: ASYNC110 - another thread may set it
                await asyncio.sleep(0.01)
            self.connections += 1
            try:
                await self._serve(connection)
            except* ConnectionError:
                pass  # the peer may disconnect at any time


@asynccontextmanager
async def streams(connection: socket.socket) -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
    """Yield a connection as streams; `drain` waits until the kernel has taken all bytes."""
    reader, writer = await asyncio.open_connection(sock=connection)
    writer.transport.set_write_buffer_limits(0)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def end_of_writing(writer: StreamWriter) -> None:
    """Send FIN and keep reading."""
    with suppress(OSError):  # the peer may have ended the connection already
        writer.write_eof()


def linger_not(connection: socket.socket) -> None:
    """Make close send RST: sent data that the peer has not read may be lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)


def reset(writer: StreamWriter) -> None:
    """End a connection with RST."""
    linger_not(writer.get_extra_info("socket"))
    writer.transport.abort()
