"""Proxy with a configuration file, which it reloads at SIGHUP."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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
        file: its configuration file.
        workers: number of worker processes.
    """

    file: Path = field(default=Path())
    workers: int = 1

    def write(self, **settings: object) -> None:
        self.file.write_text(json.dumps(settings))  # JSON is valid YAML

    async def reload(self, event: str = "reloaded", /, **settings: object) -> list[dict[str, Any]]:
        """Write these settings, send SIGHUP, and return what each worker logged."""
        self.write(**settings)
        return await self.hangs_up(event)

    async def hangs_up(self, event: str) -> list[dict[str, Any]]:
        before = len(self.logged(event, what="configuration"))
        self.process.send_signal(signal.SIGHUP)
        await until(
            lambda: len(self.logged(event, what="configuration")) == before + self.workers, START_S
        )
        return self.logged(event, what="configuration")[before:]

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
        running = Proxy(url, process, file=file, workers=workers)
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
