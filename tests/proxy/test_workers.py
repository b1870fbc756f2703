"""`epd serve --workers`: real processes, sockets and signals."""

import asyncio
import os
import shutil
import signal
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import pytest

from tests.requests import request, text
from tests.support.clients import ALICE, BOB, bearer
from tests.support.fake_instance import FakeInstance, after, decodes, encodes, hangs
from tests.support.fleet import until
from tests.support.programs import INSTANCES, refuses_connections, run, serving
from tests.support.workers import START_S, Workers, some_workers, status

pytestmark = pytest.mark.full


def two_workers(*flags: str) -> AbstractAsyncContextManager[Workers]:
    return some_workers(2, *flags)


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

    encode, decode = FakeInstance(encodes), FakeInstance(after(go, decodes))
    async with encode.running(), decode.running(), aiohttp.ClientSession() as http:
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        async with two_workers(*flags) as workers:
            chat = http.post(f"{workers.url}/v1/chat/completions", json=request(text()))
            task = asyncio.ensure_future(chat)
            await until(lambda: decode.calls)
            for pid in [workers.process.pid, *(workers.pids() if everyone else [])]:
                with suppress(ProcessLookupError):  # the idle one may have ended at the first
                    os.kill(pid, signal.SIGTERM)
            await until(lambda: refuses_connections(workers.url))
            go.set()

            assert (await task).status == 200
            assert await workers.ended() == 0
            await workers.gone()
    assert workers.rest == ""


def descriptors(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


async def test_a_worker_that_dies_is_replaced_and_no_connection_is_lost() -> None:
    async with two_workers() as workers:
        before = descriptors(workers.process.pid)
        [killed] = workers.pids(worker=1)
        os.kill(killed, signal.SIGKILL)
        statuses = await asyncio.gather(*(status(workers.url) for _ in range(16)))
        await until(lambda: len(workers.pids(worker=1)) == 2, START_S)

        assert statuses == [404] * 16
        assert len(workers.pids(worker=2)) == 1
        assert workers.pids(worker=1)[1] != killed
        assert workers.logged("worker died", worker=1)[0]["of"] == "signal 9"
        assert descriptors(workers.process.pid) == before
        workers.process.terminate()
        assert await workers.ended() == 0


async def test_a_replacement_runs_the_code_of_the_first_process(tmp_path: Path) -> None:
    """An upgrade may be replacing the installed files. Here they are gone."""
    installed = tmp_path / "installed"
    for package in ("epd", "ec_store"):
        shutil.copytree(package, installed / package)
    env = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    async with some_workers(2, env=env) as workers:
        shutil.rmtree(installed)
        os.kill(workers.pids(worker=1)[0], signal.SIGKILL)
        await until(lambda: len(workers.pids(worker=1)) == 2, START_S)
        os.kill(workers.pids(worker=2)[0], signal.SIGKILL)

        assert await asyncio.gather(*(status(workers.url) for _ in range(8))) == [404] * 8


async def test_a_worker_that_keeps_dying_ends_the_proxy() -> None:
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


def chats(url: str, count: int, key: str) -> list[asyncio.Task[int]]:
    """Begin requests of a tenant, each on a connection of its own; return their statuses."""

    async def chat() -> int:
        async with (
            aiohttp.ClientSession(headers=bearer(key)) as http,
            http.post(f"{url}/v1/chat/completions", json=request(text())) as reply,
        ):
            return reply.status

    return [asyncio.create_task(chat()) for _ in range(count)]


async def test_a_tenant_gets_its_whole_limit_over_all_workers(keys: Path) -> None:
    """A share per worker would be one request, and the connections are not spread evenly."""
    decode = FakeInstance(hangs)
    async with decode.running(), AsyncExitStack() as stack:
        urls = ["--encode-servers-urls", decode.url, "--decode-servers-urls", decode.url]
        limits = ["--api-keys-file", str(keys), "--tenant-max-requests", "4"]
        workers = await stack.enter_async_context(some_workers(4, *urls, *limits))
        running: list[asyncio.Task[int]] = []
        for number in range(1, 5):
            running += chats(workers.url, 1, ALICE)
            await until(lambda number=number: len(decode.calls) == number)  # type: ignore[misc]
        assert await asyncio.gather(*chats(workers.url, 12, ALICE)) == [429] * 12
        others = chats(workers.url, 4, BOB)
        await until(lambda: len(decode.calls) == 8)

        for task in (*running, *others):
            task.cancel()
        await asyncio.gather(*running, *others, return_exceptions=True)
        await until(lambda: decode.aborted == 8)
        running = chats(workers.url, 4, ALICE)
        await until(lambda: len(decode.calls) == 12)
        # A worker that dies takes its requests with it, and nothing else.
        for pid in workers.pids():
            os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*running, return_exceptions=True)
        await until(lambda: len(workers.pids()) == 8, START_S)
        running = chats(workers.url, 4, ALICE)
        await until(lambda: len(decode.calls) == 16)
        assert await asyncio.gather(*chats(workers.url, 4, ALICE)) == [429] * 4
        for task in running:
            task.cancel()
