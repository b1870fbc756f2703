"""An instance that follows a script, byte by byte: what no HTTP server can be made to do.

    async with Scripted([read_head(), send(HEAD + b"{"), reset()]).running() as instance:

Each connection follows the next script, and all after the last one follow that. Connections that
ask for `/health` or `/v1/models` are answered beside the scripts, so that probes disturb none.
"""

import asyncio
import re
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from tests.faults.listener import Listener, end_of_writing, streams
from tests.faults.listener import reset as reset_connection

BESIDE = (b"GET /health", b"GET /v1/models")
MODELS = b'{"object": "list", "data": [{"id": "m"}]}'


@dataclass
class Exchange:
    """One connection, and what was seen of it.

    Attributes:
        head: the request's head.
        body: what was read of its body.
        left: the peer ended the connection while the script waited, sent or held.
        done: the script has come to its end.
    """

    reader: StreamReader
    writer: StreamWriter
    head: bytes = b""
    body: bytes = b""
    left: bool = False
    done: bool = False


Step = Callable[[Exchange], Awaitable[None]]
Script = Sequence[Step]


def answer(body: bytes, status: int = 200, *, length: int | None = None) -> bytes:
    """Return a whole answer, or one with a wrong Content-Length."""
    size = len(body) if length is None else length
    head = (
        f"HTTP/1.1 {status} Status\r\n"
        f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    return head.encode() + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"  # a finished script answers no other request
)
LAST_CHUNK = b"0\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    """Pieces as chunks of a body that goes on."""
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def read_head() -> Step:
    """Read up to the request's body."""

    async def step(at: Exchange) -> None:
        at.head = await at.reader.readuntil(b"\r\n\r\n")

    return step


def read_bytes(count: int) -> Step:
    """Read so many bytes of the body."""

    async def step(at: Exchange) -> None:
        at.body += await at.reader.readexactly(count)

    return step


def read_request() -> Step:
    """Read a request to its end, which its Content-Length tells."""

    async def step(at: Exchange) -> None:
        await read_head()(at)
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", at.head)
        await read_bytes(int(length[1]) if length else 0)(at)

    return step


def send(content: bytes) -> Step:
    """Send bytes, and see them taken by the kernel."""

    async def step(at: Exchange) -> None:
        at.writer.write(content)
        await at.writer.drain()

    return step


def send_slowly(content: bytes, pause_s: float) -> Step:
    """Send byte after byte, waiting after each."""

    async def step(at: Exchange) -> None:
        for byte in content:
            at.writer.write(bytes([byte]))
            await at.writer.drain()
            await asyncio.sleep(pause_s)

    return step


def send_for_ever(piece: bytes) -> Step:
    """Send a piece again and again, until the peer leaves."""

    async def step(at: Exchange) -> None:
        while True:
            at.writer.write(piece)
            await at.writer.drain()

    return step


def wait(seconds: float) -> Step:
    async def step(_: Exchange) -> None:
        await asyncio.sleep(seconds)

    return step


def wait_for(event: asyncio.Event) -> Step:
    async def step(_: Exchange) -> None:
        await event.wait()

    return step


def hold() -> Step:
    """Do nothing until the peer leaves."""

    async def step(at: Exchange) -> None:
        while await at.reader.read(65536):
            pass
        at.left = True

    return step


def half_close() -> Step:
    """Say that no more will be sent, and go on reading."""

    async def step(at: Exchange) -> None:
        end_of_writing(at.writer)
        await hold()(at)

    return step


def close() -> Step:
    """Send what is buffered, then FIN."""

    async def step(at: Exchange) -> None:
        at.writer.close()
        await at.writer.wait_closed()

    return step


def reset() -> Step:
    async def step(at: Exchange) -> None:
        reset_connection(at.writer)

    return step


# Closed: the next request of another client must not use a connection without a script.
PROBED = [
    read_request(),
    send(answer(MODELS).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)),
    close(),
]


class Scripted:
    """A server that follows scripts.

    Attributes:
        scripts: one for each connection; the last one for all that follow.
        exchanges: the connections so far, without those that were answered beside the scripts.
    """

    def __init__(self, *scripts: Script, port: int = 0) -> None:
        self.scripts = scripts
        self.exchanges: list[Exchange] = []
        self.listener = Listener(self._follow, port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.port}"

    @property
    def aborted(self) -> int:
        """How many connections their peer has ended before the script did."""
        return sum(exchange.left for exchange in self.exchanges)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        async with self.listener.running():
            yield self

    async def _follow(self, connection: socket.socket) -> None:
        beside = (await _first_bytes(connection)).startswith(BESIDE)
        async with streams(connection) as (reader, writer):
            exchange = Exchange(reader, writer)
            if beside:
                await _follow(PROBED, exchange)
                return
            script = self.scripts[min(len(self.exchanges), len(self.scripts) - 1)]
            self.exchanges.append(exchange)
            await _follow(script, exchange)


async def _follow(script: Script, exchange: Exchange) -> None:
    try:
        for step in script:
            await step(exchange)
    except (ConnectionError, asyncio.IncompleteReadError):
        exchange.left = True
    exchange.done = True


async def _first_bytes(connection: socket.socket) -> bytes:
    """Return the peer's first bytes without consuming them; empty if it closes without sending."""
    while True:
        try:
            return connection.recv(16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            await asyncio.sleep(0.005)
