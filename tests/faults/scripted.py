"""Instance that follows a script byte by byte, for behaviour that no HTTP server offers.

    async with Scripted([read_head(), send(HEAD + b"{"), reset()]).running() as instance:

Each connection follows the next script; further connections repeat the last one. Requests for
`/health` and `/v1/models` are answered outside of the scripts, so that probes do not use one up.
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
    """One connection, and what was observed on it.

    Attributes:
        head: head of the request.
        body: bytes of the body read so far.
        left: whether the peer ended the connection while the script waited, sent or held.
        done: whether the script has reached its end.
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
    """Return a whole response; `length` may give a wrong Content-Length."""
    size = len(body) if length is None else length
    head = (
        f"HTTP/1.1 {status} Status\r\n"
        f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    return head.encode() + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"  # no request may follow a finished script
)
LAST_CHUNK = b"0\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    """Return the pieces as chunks of a body without its last chunk."""
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def read_head() -> Step:
    """Read up to the body of the request."""

    async def step(at: Exchange) -> None:
        at.head = await at.reader.readuntil(b"\r\n\r\n")

    return step


def read_bytes(count: int) -> Step:
    """Read `count` bytes of the body."""

    async def step(at: Exchange) -> None:
        at.body += await at.reader.readexactly(count)

    return step


def read_request() -> Step:
    """Read a whole request, by its Content-Length."""

    async def step(at: Exchange) -> None:
        await read_head()(at)
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", at.head)
        await read_bytes(int(length[1]) if length else 0)(at)

    return step


def send(content: bytes) -> Step:
    """Send bytes, and wait until the kernel has taken them."""

    async def step(at: Exchange) -> None:
        at.writer.write(content)
        await at.writer.drain()

    return step


def send_slowly(content: bytes, pause_s: float) -> Step:
    """Send single bytes with a pause after each."""

    async def step(at: Exchange) -> None:
        for byte in content:
            at.writer.write(bytes([byte]))
            await at.writer.drain()
            await asyncio.sleep(pause_s)

    return step


def send_endlessly(piece: bytes) -> Step:
    """Send a piece repeatedly until the peer disconnects."""

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
    """Wait until the peer disconnects."""

    async def step(at: Exchange) -> None:
        while await at.reader.read(65536):
            pass
        at.left = True

    return step


def half_close() -> Step:
    """Send FIN and keep reading."""

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


# Closed: a later request of another client must not use a connection without a script.
PROBED = [
    read_request(),
    send(answer(MODELS).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)),
    close(),
]


class Scripted:
    """Server that follows scripts.

    Attributes:
        scripts: one for each connection; further connections repeat the last one.
        exchanges: connections so far, without probes.
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
        """Return how many connections the peer has ended before the script did."""
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
