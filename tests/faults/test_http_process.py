"""Tests of test_http.py with `epd serve` on uvloop, which has its own transports."""

import asyncio
import fcntl
import json
import socket
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO

import aiohttp
import psutil
import pytest

from tests.faults.client_bytes import LONG_HEAD, NOT_HTTP, START, chat, floods, send_all
from tests.faults.scripted import Exchange, Scripted, Step, hold, read_head, send
from tests.requests import request, text
from tests.support.fake_instance import FakeInstance, chunk, decodes, encodes
from tests.support.fleet import until
from tests.support.programs import INSTANCES, serving
from tests.support.raw import answer, connected, ended, post


@pytest.mark.fault(57)
async def test_invalid_bytes_get_a_400_and_the_connection_ends() -> None:
    with serving(*INSTANCES) as (url, _):
        for sent in NOT_HTTP.values():
            async with connected(url) as (reader, writer):
                writer.write(sent)

                assert (await answer(reader)).error["slug"] == "invalid_http"
                assert await ended(reader)


@pytest.mark.fault(57, 47, 49)
async def test_a_client_still_sending_gets_its_error_response() -> None:
    with serving(*INSTANCES, "--header-timeout-s", "1", "--max-body-bytes", "10000") as (url, _):
        for sent, status in ((LONG_HEAD, b"431"), (post(b"x" * 20_000_000), b"413")):
            said = await asyncio.to_thread(send_all, url, sent)
            assert said.split()[1] == status
        async with connected(url) as (reader, writer):
            writer.write(START)
            assert (await answer(reader)).status == 408
            assert await ended(reader)
        async with connected(url) as (reader, _):
            assert await ended(reader)


@pytest.mark.fault(46)
async def test_a_client_that_does_not_read_holds_decode_back_and_is_cut_off() -> None:
    sent = [0]
    encode, decode = FakeInstance(encodes), FakeInstance(floods(chunk("x" * 10_000), sent))
    async with encode.running(), decode.running():
        flags = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        with serving(*flags, "--write-timeout-s", "1") as (url, process):
            async with connected(url) as (_, writer):
                writer.write(post(chat(stream=True)))
                await until(lambda: decode.aborted, 60)
            process.terminate()
            assert process.stderr is not None
            lines = [json.loads(line) for line in process.stderr.read().splitlines()]

    assert sent[0] < 30_000_000
    [logged] = [line for line in lines if line["event"] == "request"]
    assert (logged["status"], logged["error"]) == (499, "client_stalled")


def garbage_while_sending(proxy: Callable[[], psutil.Process]) -> list[Step]:
    """Return steps that send garbage while the body is blocked, and take what was sent.

    The proxy's process is stopped meanwhile, so that its event loop sees both at once.
    """

    async def body_is_blocked(at: Exchange) -> None:
        """Wait until the proxy sleeps with more to send: a busy one may only have had no turn."""
        opened = at.writer.get_extra_info("socket")
        unread, before = unread_bytes(opened), 0
        while not unread or unread != before or proxy().status() != psutil.STATUS_SLEEPING:
            await asyncio.sleep(0.1)
            unread, before = unread_bytes(opened), unread

    async def stop(_: Exchange) -> None:
        proxy().suspend()

    async def take_all_there_is(at: Exchange) -> None:
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.2):
                    await at.reader.readexactly(65536)

    async def go_on(_: Exchange) -> None:
        proxy().resume()

    return [
        *(read_head(), body_is_blocked, stop, send(b"\0 garbage")),
        *(take_all_there_is, go_on, hold()),
    ]


def unread_bytes(opened: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(opened.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)


IS_JSON = {"Content-Type": "application/json"}


@pytest.mark.fault(34)
async def test_an_instance_that_speaks_garbage_during_a_body_is_judged_and_another_answers() -> (
    None
):
    running: list[psutil.Process] = []
    bad, good = Scripted(garbage_while_sending(lambda: running[0])), FakeInstance(decodes)
    encode = FakeInstance(encodes)
    body = json.dumps(request(text("x" * 32 * 1024**2))).encode()
    async with bad.running(), good.running(), encode.running(), aiohttp.ClientSession() as http:
        urls = [
            "--encode-servers-urls",
            encode.url,
            "--decode-servers-urls",
            f"{bad.url},{good.url}",
        ]
        flags = ("--eject-after", "1", "--load-interval-s", "0", "--max-text-bytes", "67108864")
        with serving(*urls, *flags) as (url, process):
            running.append(psutil.Process(process.pid))
            chat = f"{url}/v1/chat/completions"
            for _ in range(2):  # one of the two requests gets the connection with the garbage
                async with http.post(chat, headers=IS_JSON, data=BytesIO(body)) as reply:
                    assert reply.status == 200
            process.terminate()
            assert process.stderr is not None
            lines = [json.loads(line) for line in process.stderr.read().splitlines()]

    assert len(bad.exchanges) == 1
    assert len(good.calls) == 2
    assert [line["state"] for line in lines if line.get("instance") == bad.url] == ["ejected"]
    assert "internal_error" not in str(lines)
