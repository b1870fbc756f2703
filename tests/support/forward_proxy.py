"""Small HTTP forward proxy: absolute URLs over http, tunnels for https."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class FakeForwardProxy:
    """Forward proxy with names of its own.

    Attributes:
        names: address and port of each known `host:port`; any other is a 502.
        refuses: status of every answer; 0 to work.
        requests: request line of each request.
        authorizations: `Proxy-Authorization` of each request.
    """

    names: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    refuses: int = 0
    requests: list[str] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeForwardProxy"]:
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.create_task(self._serve(reader, writer)))

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *fields = head.splitlines()
            method, target, _ = line.split()
            headers = dict(one.lower().split(": ", 1) for one in fields if one)
            self.requests.append(line)
            self.authorizations.append(headers.get("proxy-authorization", ""))
            parts = urlsplit(target if method != "CONNECT" else f"//{target}")
            at = self.names.get(parts.netloc)
            if self.refuses or at is None:
                status = self.refuses or 502
                writer.write(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())
                return
            origin_reader, origin_writer = await asyncio.open_connection(*at)
            with closing(origin_writer):
                if method == "CONNECT":
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                else:
                    path = head.replace(target, parts.path or "/", 1)
                    origin_writer.write(path.encode())
                await asyncio.gather(_copy(reader, origin_writer), _copy(origin_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
