"""Load client with concurrent requests and their times, and the HTTP/1.1 of both ends of the load.

The fake engines use the same minimal HTTP/1.1. A library would cost more than the proxy that is
measured, because both ends of the load share one core.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length:"
CHUNKED = b"transfer-encoding: chunked"
LAST_CHUNK = b"0\r\n\r\n"


class Message:
    """Request or response that is being received.

    Attributes:
        head: first line and headers, in lower case; empty until they are complete.
        body: bytes of the body so far, with the framing of chunks.
    """

    def __init__(self) -> None:
        self.head = b""
        self.body = bytearray()
        self.complete = False
        self._length: int | None = None

    def feed(self, data: bytes) -> None:
        """Add received bytes. The peer sends its next message only after the answer."""
        self.body += data
        if not self.head:
            end = self.body.find(HEAD_END)
            if end < 0:
                return
            self.head = bytes(self.body[:end]).lower()
            del self.body[: end + len(HEAD_END)]
            self._length = _length(self.head)
        if self._length is None:
            self.complete = self.body.endswith(LAST_CHUNK)
        else:
            self.complete = len(self.body) >= self._length

    def content(self) -> bytes:
        """Return the body of a complete message, without the framing of chunks."""
        if self._length is not None:
            return bytes(self.body)
        parts, place = list[bytes](), 0
        while True:
            line = self.body.index(b"\r\n", place)
            size = int(self.body[place:line], 16)
            if not size:
                return b"".join(parts)
            place = line + 2 + size + 2
            parts.append(bytes(self.body[line + 2 : place - 2]))

    @property
    def status(self) -> int:
        return int(self.head[9:12])


def _length(head: bytes) -> int | None:
    """Return the length of the body in bytes; None if it is chunked."""
    start = head.find(LENGTH)
    if start >= 0:
        return int(head[start + len(LENGTH) :].split(b"\r\n", 1)[0])
    return None if CHUNKED in head else 0


def head(first_line: str, body: bytes | None, content_type: str = "application/json") -> bytes:
    """Return the head of a message; without a body, it announces chunks."""
    framing = "Transfer-Encoding: chunked" if body is None else f"Content-Length: {len(body)}"
    lines = (first_line, "Host: measured", f"Content-Type: {content_type}", framing, "", "")
    return "\r\n".join(lines).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


PATH = "/v1/chat/completions"
EVENT = b"data: "
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Done:
    """Request with a complete response.

    Attributes:
        first_s: time to the first byte of the response's body; it includes the connection if the
            client opens one for this request.
        total_s: time to the last byte.
        gap_s: longest time between two arrivals of the body.
    """

    first_s: float
    total_s: float
    gap_s: float
    events: int


@dataclass(slots=True)
class BenchLoad:
    """Completed requests of a load, the failures of the others as text, and its duration."""

    done: list[Done] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Client(asyncio.Protocol):
    """Connection of the load client, with one request at a time."""

    def __init__(self, events: int) -> None:
        """Expect this number of events in each response; 0: the response is not a stream."""
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._ended: asyncio.Future[str | Done] = self._loop.create_future()
        self._answer = Message()
        self._sent_s = self._first_s = self._last_s = self._gap_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"closed: {exc}" if exc else "closed")

    def data_received(self, data: bytes) -> None:
        """Record the time of the arrival, and end the request if the response is complete."""
        now = time.perf_counter()
        answer = self._answer
        answer.feed(data)
        if answer.body:
            if self._first_s:
                self._gap_s = max(self._gap_s, now - self._last_s)
            else:
                self._first_s = now
            self._last_s = now
        if answer.complete:
            self._end(self._done(answer, now))

    def _done(self, answer: Message, now: float) -> str | Done:
        if answer.status != 200:  # noqa: PLR2004
            return f"{answer.status}: {bytes(answer.body[:200]).decode(errors='replace')}"
        streamed = b"text/event-stream" in answer.head
        events = answer.content().count(EVENT) if streamed else 0
        if events != self._events:
            return f"{events} events of {self._events}"
        return Done(self._first_s - self._sent_s, now - self._sent_s, self._gap_s, events)

    def _end(self, how: str | Done) -> None:
        if not self._ended.done():
            self._ended.set_result(how)

    async def send_request(self, body: bytes, began_s: float | None = None) -> str | Done:
        """Send a request and wait for its whole response; return a text if it failed.

        Its times start at `began_s` on the clock of `time.perf_counter`; None: now.
        """
        self._ended = self._loop.create_future()
        self._answer = Message()
        self._sent_s = time.perf_counter() if began_s is None else began_s
        self._first_s = self._gap_s = 0.0
        self._transport.write(head(f"POST {PATH} HTTP/1.1", body))
        self._transport.write(body)
        return await self._ended

    def close(self) -> None:
        self._transport.abort()


async def run(  # noqa: PLR0913 - parameters of a load
    url: str,
    bodies: Iterator[bytes],
    clients: int,
    *,
    events: int,
    seconds: float | None,
    connect: bool = False,
) -> BenchLoad:
    """Put a load of concurrent clients on a server for some seconds.

    Each response must have this number of events; 0: it must not be a stream. If `seconds` is None,
    each client sends one request, all at the same time. With `connect`, each client connects only
    when it sends its request.

    Raises:
        TimeoutError: responses were not complete `TIMEOUT_S` seconds after the last request.
        OSError: the server cannot be reached.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    load = BenchLoad()
    loop = asyncio.get_running_loop()
    connections: list[Client] = []

    async def connected() -> Client:
        _, client = await loop.create_connection(partial(Client, events), host, port)
        connections.append(client)
        return client

    ready = [None if connect else await connected() for _ in range(clients)]
    began = time.perf_counter()

    async def run_client(client: Client | None) -> None:
        began_s = time.perf_counter() if client is None else None
        client = client or await connected()
        while True:
            how = await client.send_request(next(bodies), began_s)
            began_s = None
            if isinstance(how, Done):
                load.done.append(how)
            else:
                load.failed.append(how)
            if seconds is None or isinstance(how, str) or time.perf_counter() - began > seconds:
                return

    try:
        async with asyncio.timeout((seconds or 0.0) + TIMEOUT_S):
            await asyncio.gather(*(run_client(client) for client in ready))
    except TimeoutError:
        raise TimeoutError(f"did not answer within {TIMEOUT_S:.0f} s") from None
    finally:
        for client in connections:
            client.close()
    load.seconds = time.perf_counter() - began
    return load
