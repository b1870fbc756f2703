"""Proxy with several workers that reloads its files at SIGHUP."""

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp

from tests.certificates import Authority
from tests.support.clients import bearer
from tests.support.fleet import until
from tests.support.programs import INSTANCES, serving
from tests.support.workers import Workers

GAUGE = "epd_config_last_reload_success"


@asynccontextmanager
async def proxy(workers: int, *flags: str) -> AsyncIterator[Workers]:
    with serving(*INSTANCES, "--workers", str(workers), *flags) as (url, process):
        running = Workers(url, process)
        reading = asyncio.create_task(running.read())
        try:
            if workers > 1:
                await until(lambda: len(running.pids()) == workers, 120)
            yield running
            process.terminate()
            assert await running.ended() == 0
        finally:
            process.kill()
            await reading
    assert running.rest == ""


async def everywhere(ask: Callable[[], Awaitable[object]]) -> set[object]:
    """Return the results of many connections, which reach all workers."""
    return set(await asyncio.gather(*(ask() for _ in range(12))))


async def reload(running: Workers, workers: int, event: str) -> None:
    before = len(running.logged(event))
    running.process.send_signal(signal.SIGHUP)
    await until(lambda: len(running.logged(event)) == before + workers, 120)


async def models(url: str, key: str) -> int:
    """Return 401 for an invalid key, or else 502, since there is no instance."""
    async with (
        aiohttp.ClientSession(headers=bearer(key)) as http,
        http.get(f"{url}/v1/models") as reply,
    ):
        return reply.status


async def gauge(url: str, key: str) -> float:
    async with (
        aiohttp.ClientSession(headers=bearer(key)) as http,
        http.get(f"{url}/metrics") as reply,
    ):
        [line] = [one for one in (await reply.text()).splitlines() if one.startswith(GAUGE)]
        return float(line.split()[1])


async def certificate(port: int, authority: Authority) -> bytes | None:
    """Return the certificate that a new connection receives."""
    trust = ssl.create_default_context(cafile=authority.ca)
    _, writer = await asyncio.open_connection("localhost", port, ssl=trust)
    shown: ssl.SSLObject = writer.get_extra_info("ssl_object")
    writer.close()
    return shown.getpeercert(binary_form=True)
