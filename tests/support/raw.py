"""Raw bytes over a connection, for requests that no HTTP client sends."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    """Open a connection to a server, without TLS."""
    host, _, port = url.partition("://")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    version: str = "HTTP/1.1"

    @property
    def error(self) -> dict[str, Any]:
        """Return the error of the answer; it must have OpenAI's shape and all of our headers."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        assert all(name in self.headers for name in ("x-request-id", "x-epd-stage", "x-epd-error"))
        assert self.headers["content-type"].startswith("application/json")
        return {**error, "slug": self.headers["x-epd-error"]}


async def answer(reader: asyncio.StreamReader, timeout_s: float = 20) -> Answer:
    """Return the next answer on a connection that may stay open."""
    async with asyncio.timeout(timeout_s):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    version, status, _ = head[0].split(" ", 2)
    return Answer(int(status), headers, body, version)


async def ended(reader: asyncio.StreamReader, timeout_s: float = 9) -> bool:
    """Return whether the peer has ended the connection without sending anything more.

    The timeout is shorter than the time for which the proxy keeps an idle connection open.
    """
    async with asyncio.timeout(timeout_s):
        return await reader.read() == b""


def post(body: bytes | int, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    """Return a request, or, if `body` is a number, the head of a request with a body that long."""
    size = body if isinstance(body, int) else len(body)
    lines = {"Host": "epd", "Content-Length": str(size), "Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + (b"" if isinstance(body, int) else body)
