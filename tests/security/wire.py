"""HTTP as bytes: requests that no client library sends, and a server that only listens."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from multidict import CIMultiDict

from tests.support.raw import Answer

TIMEOUT_S = 60


async def ask(
    url: str, line: str, headers: Iterable[tuple[str, str]] = (), body: bytes = b""
) -> Answer:
    """Send one request, such as `GET //x HTTP/1.1`, on a new connection."""
    host, port = url.removeprefix("http://").split(":")
    given = [("Host", f"{host}:{port}"), *headers, ("Content-Length", str(len(body)))]
    last = {name.lower(): f"{name}: {value}" for name, value in given}
    head = "\r\n".join([line, *last.values(), "Connection: close", "", ""])
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode("utf-8", "surrogateescape") + body)
        try:
            return _answer(await reader.read())
        finally:
            writer.close()


def _answer(raw: bytes) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = CIMultiDict(
        (name, value.strip()) for name, _, value in (x.partition(":") for x in lines)
    )
    return Answer(int(status.split()[1]), headers, body)


@dataclass
class Silent:
    """Server that never answers and records the first line of each request except probes."""

    url: str
    lines: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def silent() -> AsyncIterator[Silent]:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line.endswith(b"/health HTTP/1.1\r\n"):
            here.lines.append(line)
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    here = Silent(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        yield here
