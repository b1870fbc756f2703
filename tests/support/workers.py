"""`epd serve --workers`, and the log of its processes."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.requests import image, request, text
from tests.support.fleet import until
from tests.support.programs import INSTANCES, serving

START_S = 120
"""Timeout of a start; starting Python takes long while tests run in parallel."""


@dataclass
class Workers:
    """Running `epd serve --workers`, and its log so far."""

    url: str
    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    rest: str = ""

    async def read(self) -> None:
        assert self.process.stderr is not None
        while line := await asyncio.to_thread(self.process.stderr.readline):
            if line.startswith("{"):
                self.lines.append(json.loads(line))
            else:
                self.rest += line

    def logged(self, event: str, **fields: object) -> list[dict[str, Any]]:
        return [
            line
            for line in self.lines
            if line["event"] == event and all(line[name] == fields[name] for name in fields)
        ]

    def pids(self, worker: int | None = None) -> list[int]:
        lines = self.logged("serving") if worker is None else self.logged("serving", worker=worker)
        return [line["pid"] for line in lines]

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, START_S)

    async def gone(self) -> None:
        await until(lambda: not any(map(lives, self.pids())), 60)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty: dead, but not yet reaped
    except (FileNotFoundError, ProcessLookupError):
        return False


@asynccontextmanager
async def some_workers(
    count: int, *flags: str, env: dict[str, str] | None = None
) -> AsyncIterator[Workers]:
    """Run workers; with variables in addition to those of this process, as an executed program."""
    flags = (*(flags or INSTANCES), "--workers", str(count), "--log-level", "debug")
    with serving(*flags, env=env, executed=env is not None) as (url, process):
        workers = Workers(url, process)
        reading = asyncio.create_task(workers.read())
        try:
            await until(lambda: len(workers.pids()) == count, START_S)
            yield workers
        finally:
            for pid in filter(lives, workers.pids()):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            await reading


async def status(url: str, path: str = "/nothing") -> int:
    """Return the status of a request on a new connection."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}{path}") as reply:
        return reply.status


async def ask(url: str) -> tuple[int, str]:
    """Ask about a picture on a new connection; return the status and `x-epd-items`."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=request(image(), text())) as reply,
    ):
        return reply.status, reply.headers["x-epd-items"]
