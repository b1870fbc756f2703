"""`epd serve --workers`: real processes, sockets and signals."""

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.backed import Backed
from tests.proxy.fake_instance import FakeInstance, decodes, encodes, hangs
from tests.proxy.fleet import until
from tests.proxy.test_process import INSTANCES, refuses_connections, run, serving
from tests.requests import image, request, text

START_S = 120
"""Starting Python may take its time where tests run side by side."""


@dataclass
class Workers:
    """A running `epd serve --workers`, and what it logged so far."""

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
async def some_workers(count: int, *flags: str) -> AsyncIterator[Workers]:
    flags = (*(flags or INSTANCES), "--workers", str(count), "--log-level", "debug")
    with serving(*flags) as (url, process):
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


def two_workers(*flags: str) -> AbstractAsyncContextManager[Workers]:
    return some_workers(2, *flags)


async def status(url: str, path: str = "/nothing") -> int:
    """The status of a request on a connection of its own."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}{path}") as reply:
        return reply.status


async def test_requests_are_spread_over_the_workers() -> None:
    async with two_workers() as workers:
        statuses = await asyncio.gather(*(status(workers.url) for _ in range(32)))
        await until(lambda: len(workers.logged("request")) == 32)

    assert statuses == [404] * 32
    assert {line["worker"] for line in workers.logged("request")} == {1, 2}
    assert len(set(workers.pids())) == 2
    assert workers.process.pid not in workers.pids()


@pytest.mark.parametrize("everyone", [False, True], ids=["the first", "every process"])
async def test_sigterm_lets_running_requests_end(everyone: bool) -> None:
    go = asyncio.Event()

    async def waits(web_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await go.wait()
        return await decodes(web_request, body)

    encode, decode = FakeInstance(encodes), FakeInstance(waits)
    async with encode.running(), decode.running(), aiohttp.ClientSession() as http:
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        async with two_workers(*flags) as workers:
            chat = http.post(f"{workers.url}/v1/chat/completions", json=request(text()))
            task = asyncio.ensure_future(chat)
            await until(lambda: decode.calls)
            for pid in [workers.process.pid, *(workers.pids() if everyone else [])]:
                os.kill(pid, signal.SIGTERM)
            await until(lambda: refuses_connections(workers.url))
            go.set()

            assert (await task).status == 200
            assert await workers.ended() == 0
            await workers.gone()
    assert workers.rest == ""


@pytest.mark.fault(62)
async def test_a_second_signal_ends_all_at_once() -> None:
    encode, decode = FakeInstance(encodes), FakeInstance(hangs)
    async with encode.running(), decode.running(), aiohttp.ClientSession() as http:
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        async with two_workers(*flags) as workers:
            chat = http.post(f"{workers.url}/v1/chat/completions", json=request(text()))
            task = asyncio.ensure_future(chat)
            await until(lambda: decode.calls)
            workers.process.send_signal(signal.SIGINT)
            await until(lambda: refuses_connections(workers.url))
            assert decode.aborted == 0
            workers.process.send_signal(signal.SIGINT)

            assert await workers.ended() == 0
            await until(lambda: decode.aborted)
            await until(lambda: workers.logged("request", status=499))
            await workers.gone()
            with pytest.raises(aiohttp.ClientError):
                await task
    assert workers.rest == ""


async def test_a_worker_that_dies_is_replaced_and_no_connection_is_lost() -> None:
    async with two_workers() as workers:
        [killed] = workers.pids(worker=1)
        os.kill(killed, signal.SIGKILL)
        statuses = await asyncio.gather(*(status(workers.url) for _ in range(16)))
        await until(lambda: len(workers.pids(worker=1)) == 2, START_S)

        assert statuses == [404] * 16
        assert len(workers.pids(worker=2)) == 1
        assert workers.pids(worker=1)[1] != killed
        assert workers.logged("worker died", worker=1)[0]["of"] == "signal 9"
        workers.process.terminate()
        assert await workers.ended() == 0


async def test_a_worker_that_dies_again_and_again_ends_everything() -> None:
    async with two_workers() as workers:
        killed: set[int] = set()
        for _ in range(5):
            await until(lambda: {*workers.pids(worker=1)} - killed, START_S)
            [pid] = {*workers.pids(worker=1)} - killed
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)

        assert await workers.ended() == 1
        await workers.gone()
    assert workers.rest == "epd serve: worker 1 died 5 times in a row, last of signal 9\n"


async def test_workers_end_with_the_process_that_started_them() -> None:
    async with two_workers() as workers:
        workers.process.kill()

        await workers.gone()
        assert refuses_connections(workers.url)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_the_port_of_running_workers_is_taken(workers: str) -> None:
    async with two_workers() as running:
        port = running.url.rpartition(":")[2]
        flags = ["--host", "127.0.0.1", "--port", port, "--workers", workers]
        ended = await asyncio.to_thread(run, "serve", *INSTANCES, *flags)

    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert ended.stderr.count("\n") == 1


async def test_each_address_of_a_host_is_served() -> None:
    with serving(*INSTANCES, "--host", "localhost", "--workers", "2") as (url, _):
        port = url.rpartition(":")[2]

        assert await status(f"http://localhost:{port}") == 404


async def test_two_proxies_of_two_workers_encode_a_new_picture_once(
    backed: Backed, url: str
) -> None:
    backed.encode_s, backed.write_s = 0.5, 0.2
    encode, decode = FakeInstance(backed.encodes), FakeInstance(backed.decodes)
    flags = ["--ec-store", url, "--ec-store-budget-s", "5"]
    async with AsyncExitStack() as stack:
        for instance in (encode, decode):
            await stack.enter_async_context(instance.running())
        flags += ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        proxies = [await stack.enter_async_context(two_workers(*flags)) for _ in range(2)]
        replies = await asyncio.gather(*(ask(proxy.url) for proxy in proxies for _ in range(32)))
        for proxy in proxies:
            await until(lambda proxy=proxy: len(proxy.logged("request")) == 32)  # type: ignore[misc]
        served = {
            (number, line["worker"])
            for number, proxy in enumerate(proxies)
            for line in proxy.logged("request")
        }
        await asyncio.gather(*backed.writes)

    assert [status for status, _ in replies] == [200] * 64
    assert len(served) == 4
    assert len(encode.calls) == 1
    items = Counter(items for _, items in replies)
    assert items == {"hit=0,encoded=1,local=0": 1, "hit=1,encoded=0,local=0": 63}


async def ask(url: str) -> tuple[int, str]:
    """Ask about a picture, on a connection of its own: the status, and where the picture was."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=request(image(), text())) as reply,
    ):
        return reply.status, reply.headers["x-epd-items"]
