"""Real Prometheus with the configuration of `deploy/`, in front of a proxy on this machine."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from scripts.ports import free_ports
from tests.deploy.tools import PROMETHEUS, program

START_S = 60.0


@dataclass
class Prometheus:
    """Running Prometheus server."""

    url: str
    http: aiohttp.ClientSession

    async def get(self, path: str, **parameters: str) -> Any:
        """Return the answer of the server's API."""
        async with self.http.get(f"{self.url}/api/v1/{path}", params=parameters) as reply:
            answer = await reply.json()
            assert answer["status"] == "success", answer
            return answer["data"]

    async def value(self, expr: str) -> float | None:
        """Return the single value of an expression; None without one."""
        result = (await self.get("query", query=expr))["result"]
        return float(result[0]["value"][1]) if result else None


@asynccontextmanager
async def prometheus(folder: Path, target: str, admin_key: str) -> AsyncIterator[Prometheus]:
    """Start Prometheus on a copy of the configuration with test addresses and intervals."""
    configuration = folder / "prometheus"
    shutil.copytree(PROMETHEUS, configuration)
    (folder / "key").write_text(admin_key + "\n")
    main = configuration / "prometheus.yml"
    text = main.read_text()
    for theirs, ours in (
        ("/run/secrets/epd-admin-key", str(folder / "key")),
        ("proxy:8000", target),
        ("_interval: 15s", "_interval: 1s"),
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    main.write_text(text)
    [port] = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        program("prometheus"),
        f"--config.file={main}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as http:
            await _ready(process, http, f"http://127.0.0.1:{port}/-/ready")
            yield Prometheus(f"http://127.0.0.1:{port}", http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(
    process: asyncio.subprocess.Process, http: aiohttp.ClientSession, url: str
) -> None:
    async with asyncio.timeout(START_S):
        while process.returncode is None:
            try:
                async with http.get(url) as reply:
                    if reply.ok:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise AssertionError("prometheus has ended")
