"""Fake endpoint picker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.fleet import Fleet

STRANGERS = {"decode_hosts": "127.0.0.0/8"}


def asked(fleet: Fleet) -> tuple[int, int, int]:
    """Return how many requests the encode, prefill and decode instances have received."""
    groups = (fleet.encode, fleet.prefill, fleet.decode)
    encode, prefill, decode = (sum(len(one.calls) for one in group) for group in groups)
    return encode, prefill, decode


@dataclass
class Picker:
    """Endpoint picker with a fixed answer.

    Attributes:
        answer: its answer, sent with this status.
        questions: requests that it received.
        order: order of events, where a test adds to it.
    """

    answer: Any = None
    status: int = 200
    delay_s: float = 0
    questions: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    url: str = ""

    async def _pick(self, web_request: web.Request) -> web.Response:
        self.order.append("picker")
        self.headers.append({name.lower(): value for name, value in web_request.headers.items()})
        self.questions.append(await web_request.json())
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, bytes):
            return web.Response(body=self.answer, status=self.status)
        return web.json_response(self.answer, status=self.status)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Picker"]:
        app = web.Application()
        app.router.add_post("/pick", self._pick)
        runner = web.AppRunner(app, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/pick"
        try:
            yield self
        finally:
            await runner.cleanup()


def picked_by(picker: Picker) -> dict[str, Any]:
    return {
        "decode_from": "picker",
        "decode_picker_url": picker.url,
        "decode_picker_timeout_s": 30,  # far longer than any test waits
    }
