"""Proxy with a configuration file."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.requests import image, request, text
from tests.support.fake_instance import FakeInstance
from tests.support.fleet import until
from tests.support.programs import serving
from tests.support.reloading import everywhere
from tests.support.workers import START_S, Workers


@dataclass
class Proxy(Workers):
    """Running `epd serve --config`.

    Attributes:
        workers: number of worker processes.
    """

    workers: int = 1

    async def chat(self, http: aiohttp.ClientSession, *parts: dict[str, Any]) -> int:
        body = request(*(parts or (image(), text())))
        async with http.post(f"{self.url}/v1/chat/completions", json=body) as reply:
            await reply.read()
            return reply.status

    async def statuses(self, *parts: dict[str, Any]) -> set[object]:
        """Return the statuses of requests on many connections, which reach all workers."""

        async def ask() -> int:
            async with aiohttp.ClientSession() as http:
                return await self.chat(http, *parts)

        return await everywhere(ask)


@asynccontextmanager
async def proxy(
    folder: Path, workers: int, /, *flags: str, **settings: object
) -> AsyncIterator[Proxy]:
    file = folder / "epd.yaml"
    file.write_text(json.dumps(settings))
    with serving("--config", str(file), "--workers", str(workers), *flags) as (url, process):
        running = Proxy(url, process, workers=workers)
        reading = asyncio.create_task(running.read())
        try:
            if workers > 1:
                await until(lambda: len(running.pids()) == workers, START_S)
            yield running
            process.terminate()
            assert await running.ended() == 0
        finally:
            process.kill()
            await reading
    assert running.rest == ""


@asynccontextmanager
async def instances(*chats: Callable[..., Any]) -> AsyncIterator[list[FakeInstance]]:
    made = [FakeInstance(chat) for chat in chats]
    async with made[0].running():
        if len(made) == 1:
            yield made
            return
        async with instances(*chats[1:]) as rest:
            yield [made[0], *rest]
