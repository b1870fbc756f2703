"""Web server for remote media, and host names that resolve to it."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOST = "127.0.0.1"
"""Host name of origins; they are fetched over http, like an operator's own media server."""

ALLOWED: dict[str, Any] = {
    "media_fetch": "proxy",
    "allowed_media_domains": f"{HOST},media.test",
    "allow_http_media": True,
    "allow_private_media": True,
}


@dataclass
class FakeOrigin:
    """Origin that serves one picture at every path.

    Attributes:
        content: current picture.
        headers: headers of the response.
        answer: handler that replaces the picture.
        requests: path and headers of each request.
        sent: number of full responses; a 304 does not count.
    """

    content: bytes = b"picture"
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "image/png"})
    answer: Answer | None = None
    requests: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    sent: int = 0
    aborted: int = 0
    url: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path_qs, request.headers))
        try:
            if self.answer is not None:
                return await self.answer(request)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        etag = self.headers.get("ETag")
        modified = self.headers.get("Last-Modified")
        if (etag and request.headers.get("If-None-Match") == etag) or (
            modified and request.headers.get("If-Modified-Since") == modified
        ):
            return web.Response(status=304, headers=self.headers)
        self.sent += 1
        return web.Response(body=self.content, headers=self.headers)

    @asynccontextmanager
    async def running(self, context: ssl.SSLContext | None = None) -> AsyncIterator["FakeOrigin"]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0, ssl_context=context).start()
        self.url = f"{'http' if context is None else 'https'}://{HOST}:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


class FakeNames(AbstractResolver):
    """Fake resolver that returns the given answers one after another."""

    def __init__(self, *answers: str | OSError) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OSError):
            raise answer
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in answer.split(",")
        ]

    async def close(self) -> None:
        pass
