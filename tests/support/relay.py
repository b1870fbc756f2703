"""TCP relay that delays, slows down, truncates or drops bytes, as networks do.

It knows no protocol, and works in front of an HTTP server or of Redis.
"""

import asyncio
import socket
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from tests.faults.listener import Listener, end_of_writing, reset, streams

SLICE_S = 0.05
"""Seconds between pieces when the rate is limited."""

End = Literal["close", "reset", "half_close", "silence"]


class Target(Protocol):
    """Target of connections: anything with a port on 127.0.0.1."""

    @property
    def port(self) -> int: ...


@dataclass
class Way:
    """Treatment of the bytes of one direction; the relay reads it again for each piece.

    Attributes:
        latency_s: delay of each piece, in seconds.
        bytes_per_s: rate limit; None: no limit.
        cut_after: number of bytes after which each connection ends; None: no limit.
        end: `close` and `half_close` send FIN, for both directions or for this one; `reset` sends
            RST; `silence` discards the rest and leaves the connection open: a black hole.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    cut_after: int | None = None
    end: End = "reset"


@dataclass
class Relay:
    """Relay from its clients to `target`. A connection keeps the target that it started with.

    Both directions may be changed at any time and from any thread.

    Attributes:
        target: target of new connections.
        requests: direction to the target.
        answers: direction from the target.
    """

    target: Target
    requests: Way = field(default_factory=Way)
    answers: Way = field(default_factory=Way)

    def __post_init__(self) -> None:
        self.listener = Listener(self._relay)

    @property
    def port(self) -> int:
        return self.listener.port

    def url(self, query: str = "", scheme: str = "redis") -> str:
        """Return the relay's address in the form of the target's URL."""
        return f"{scheme}://127.0.0.1:{self.port}" + (f"/?{query}" if scheme != "http" else "")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Run the relay on this event loop."""
        async with self.listener.running():
            yield self

    @contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Run the relay on an event loop in a thread, for tests that are not async."""
        loop, stop, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

        async def run() -> None:
            async with self.running():
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
        thread.start()
        ready.wait()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    async def _relay(self, connection: socket.socket) -> None:
        async with streams(connection) as (reader, writer):
            try:
                onward = socket.create_connection(("127.0.0.1", self.target.port))
            except OSError:
                return
            # When one peer disconnects, the relay disconnects the other, as without a relay.
            async with streams(onward) as (there, back), asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, back, self.requests, back_to=writer))
                group.create_task(_pump(there, writer, self.answers, back_to=back))


async def _pump(
    reader: StreamReader, writer: StreamWriter, way: Way, back_to: StreamWriter
) -> None:
    passed = 0
    while piece := await reader.read(65536):
        await asyncio.sleep(way.latency_s)
        if way.cut_after is not None:
            piece = piece[: max(0, way.cut_after - passed)]
        passed += len(piece)
        await _write(writer, piece, way)
        if way.cut_after is not None and passed >= way.cut_after:
            await _cut(reader, writer, way.end, back_to)
            return
    end_of_writing(writer)


async def _write(writer: StreamWriter, piece: bytes, way: Way) -> None:
    while piece and way.bytes_per_s is not None:
        size = max(1, int(way.bytes_per_s * SLICE_S))
        writer.write(piece[:size])
        await writer.drain()
        await asyncio.sleep(size / way.bytes_per_s)
        piece = piece[size:]
    writer.write(piece)
    await writer.drain()


async def _cut(reader: StreamReader, writer: StreamWriter, end: End, back_to: StreamWriter) -> None:
    if end == "half_close":
        end_of_writing(writer)
    elif end == "silence":
        while await reader.read(65536):
            pass
        end_of_writing(writer)
    else:
        for each in (writer, back_to):
            reset(each) if end == "reset" else each.close()
