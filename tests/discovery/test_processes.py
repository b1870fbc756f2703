"""Registrations at one process reach all workers, their replacements and other proxies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.discovery.name_server import NameServer
from tests.support.fake_instance import FakeInstance, decodes, encodes
from tests.support.fleet import until
from tests.support.programs import serving
from tests.support.redis_server import RedisServer
from tests.support.workers import START_S, Workers, ask, some_workers

pytestmark = pytest.mark.full

KEY = "admin-key-0123456789"
ADMIN = {"X-API-Key": KEY}


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_API_KEY", KEY)


async def call(method: str, url: str, **more: Any) -> tuple[int, dict[str, Any]]:
    """Send a request on a new connection, which any worker may accept."""
    async with (
        aiohttp.ClientSession(headers=ADMIN) as http,
        http.request(method, f"{url}/instances", **more) as reply,
    ):
        return reply.status, await reply.json()


async def register(url: str, role: str, instance: str) -> None:
    said = await call("POST", url, json={"role": role, "url": instance})
    assert said == (200, {"registered": True})


async def live(url: str) -> list[str]:
    _, page = await call("GET", url)
    return sorted(row["url"] for row in page["instances"])


async def all_see(url: str, urls: list[str], answers: int = 16) -> None:
    """Wait until enough consecutive answers, from any worker, agree."""

    async def seen() -> bool:
        return await asyncio.gather(*(live(url) for _ in range(answers))) == [urls] * answers

    async with asyncio.timeout(START_S):
        while not await seen():  # noqa: ASYNC110 - the proxy sets no event
            await asyncio.sleep(0.05)


@asynccontextmanager
async def two(*flags: str) -> AsyncIterator[Workers]:
    async with some_workers(2, *flags) as workers:
        yield workers


async def replaced(workers: Workers, number: int) -> None:
    """Kill a worker, and wait for its replacement."""
    before = len(workers.pids(worker=number))
    os.kill(workers.pids(worker=number)[-1], signal.SIGKILL)
    await until(lambda: len(workers.pids(worker=number)) > before, START_S)


async def test_all_workers_know_and_so_do_those_that_replace_them() -> None:
    async with (
        FakeInstance(encodes).running() as encode,
        FakeInstance(decodes).running() as decode,
        two("--dynamic-registration") as workers,
    ):
        await register(workers.url, "prefill_decode", decode.url)
        await register(workers.url, "encode", encode.url)
        everyone = sorted([encode.url, decode.url])
        await all_see(workers.url, everyone)
        for number in (1, 2):
            await replaced(workers, number)
            await all_see(workers.url, everyone)
        replies = await asyncio.gather(*(ask(workers.url) for _ in range(8)))
        assert {status for status, _ in replies} == {200}
        removed = await call("DELETE", workers.url, params={"url": encode.url})
        assert removed == (200, {"removed": True})
        await all_see(workers.url, [decode.url])
        workers.process.terminate()
        assert await workers.ended() == 0
    assert workers.rest == ""
    removals = workers.logged("instance removed", instance=encode.url)
    assert {line["worker"] for line in removals} == {1, 2}


async def test_a_worker_that_starts_without_a_name_server_gets_the_known_addresses(
    tmp_path: Path,
) -> None:
    path = tmp_path / "instances.yaml"
    path.write_text("instances: [{role: prefill_decode, url: 'http://d:1'}]")
    async with NameServer({"e.svc": ["127.0.0.9"]}).running() as server:
        flags = ["--discover-encode", "e.svc:9", "--discovery-dns-server", server.address]
        async with two(*flags, "--instances-file", str(path)) as workers:
            everyone = ["http://127.0.0.9:9", "http://d:1"]
            await all_see(workers.url, everyone)
            server.failing = True
            path.write_text("garbage")
            await replaced(workers, 1)
            await all_see(workers.url, everyone)


async def test_registrations_outlive_the_proxy_and_another_finds_them(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        flags = ["--dynamic-registration", "--registration-store", redis.url()]
        with serving(*flags) as (first, process), serving(*flags) as (second, _):
            await register(first, "encode", "http://e:1")
            await register(second, "prefill_decode", "http://d:1")
            everyone = ["http://d:1", "http://e:1"]
            await all_see(first, everyone, answers=1)
            await all_see(second, everyone, answers=1)
            process.kill()
        with serving(*flags) as (third, _):
            assert await live(third) == everyone
