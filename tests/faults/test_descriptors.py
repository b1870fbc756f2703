"""Row 58: more clients than file descriptors."""

import asyncio
import json
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import pytest

from epd.edge.request_head import client_connections
from tests.requests import request, text
from tests.support.fake_instance import FakeInstance, decodes, encodes
from tests.support.fleet import Launch
from tests.support.programs import ADDRESS, EPD, INSTANCES
from tests.support.raw import answer, connected, ended, post

pytestmark = pytest.mark.full

launch = Launch()


@contextmanager
def serving(*flags: str, descriptors: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `epd serve` with a hard limit of descriptors, and a soft one of 40."""
    limits = f'ulimit -Sn 40; ulimit -Hn {descriptors}; exec "$@"'
    command = ["sh", "-c", limits, "sh", *EPD, "serve", *ADDRESS, "--log-format", "json", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield json.loads(process.stderr.readline())["url"], process
        finally:
            process.kill()


def opened(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10)


def cpu_s(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def highest_open() -> int:
    return max(int(path.name) for path in Path("/proc/self/fd").iterdir())


@pytest.mark.fault(58)
async def test_connections_above_the_limit_get_503_with_retry_after() -> None:
    async with launch(max_connections=2) as fleet:
        async with connected(fleet.url), connected(fleet.url) as (reader, writer):
            async with connected(fleet.url) as (third, asking):
                asking.write(post(2) + b"{}")
                said = await answer(third)

                assert (said.status, said.error["slug"]) == (503, "overloaded")
                assert int(said.headers["retry-after"]) >= 1
                assert await ended(third)
            writer.write(post(json.dumps(request(text())).encode()))
            assert (await answer(reader)).status == 200
        async with asyncio.timeout(60):
            while (await fleet.chat(request(text())))[0] != 200:  # noqa: ASYNC110 - polls, as a client does
                await asyncio.sleep(0.05)

    refused = [event for event in fleet.events.requests if event.status == 503]
    assert refused[0].error == "overloaded"


@pytest.mark.fault(58)
async def test_a_flood_of_connections_is_closed_without_a_word() -> None:
    async with launch(max_connections=1) as fleet, connected(fleet.url):
        refused = [await asyncio.open_connection(*_address(fleet.url)) for _ in range(80)]
        firsts = [await asyncio.wait_for(_first(reader), 20) for reader, _ in refused]
        for _, writer in refused:
            writer.transport.abort()

    assert firsts.count(b"HTTP/1.1 503") == 64
    assert firsts.count(b"") == 16


def _address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


async def _first(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(12)
    except ConnectionError:
        return b""


@pytest.mark.fault(58)
def test_a_process_raises_its_limit_and_keeps_descriptors_back_for_instances() -> None:
    with serving(*INSTANCES, descriptors=160) as (url, process), ExitStack() as stack:
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        clients = [stack.enter_context(opened(url)) for _ in range(40)]
        for client in clients:
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: epd\r\n\r\n")
        said = [client.recv(12) for client in clients]

    assert "Max open files            160                  160" in limits
    assert said.count(b"HTTP/1.1 200") == (160 - 64) // 3
    assert said.count(b"HTTP/1.1 503") == 8


@pytest.mark.fault(58)
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_the_proxy_accepts_again_once_descriptors_are_free(workers: str) -> None:
    """The limit was set too high, so that the kernel refuses connections."""
    encode, decode = FakeInstance(encodes), FakeInstance(decodes)
    async with encode.running(), decode.running():
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        flags += ["--max-connections", "10000", "--workers", workers]
        with serving(*flags, descriptors=64) as (url, process):
            await _served(url)
            with ExitStack() as stack:
                for _ in range(200):
                    stack.enter_context(await asyncio.to_thread(opened, url))
                before = cpu_s(process)
                await asyncio.sleep(2)
                assert cpu_s(process) - before < 1  # no busy loop

            await _served(url)
            assert process.poll() is None


async def _served(url: str) -> None:
    async with asyncio.timeout(60):
        while await _chat(url) != 200:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.1)


async def _chat(url: str) -> int | None:
    try:
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{url}/v1/chat/completions", json=request(text())) as reply,
        ):
            return reply.status
    except aiohttp.ClientError:
        return None


@pytest.mark.fault(58)
async def test_a_lack_of_descriptors_is_not_counted_against_the_instance() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with launch() as fleet, connected(fleet.url) as (reader, writer):
        writer.write(b"GET /ready HTTP/1.1\r\nHost: epd\r\n\r\n")
        await answer(reader)
        for _ in range(100):  # the health checks' connections close
            await asyncio.sleep(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest_open() + 20, hard))
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            writer.write(post(json.dumps(request(text())).encode()))
            said = await answer(reader)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in held:
                os.close(descriptor)

        assert (said.status, said.error["slug"]) == (503, "overloaded")
        assert said.headers["retry-after"]
        assert (await fleet.chat(request(text())))[0] == 200


def test_a_very_low_limit_still_admits_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 32))

    assert client_connections() == 1
