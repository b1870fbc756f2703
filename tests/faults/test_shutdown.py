"""SIGTERM and SIGINT with requests in progress: rows 61 and 62, real processes and sockets."""

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from tests.requests import request, text
from tests.support.fake_instance import STREAM, FakeInstance, Handler, decodes, encodes, hangs
from tests.support.fleet import until
from tests.support.programs import refuses_connections, serving
from tests.support.raw import post

END_S = 60
"""Seconds for the end of the process; much longer than needed, much shorter than the drain
delay."""
LONG = "300"
MUCH = 32 * 1024**2
"""Bytes; more than socket buffers hold."""

pytestmark = [pytest.mark.full, pytest.mark.parametrize("workers", ["1", "2"])]


@dataclass
class Decode(FakeInstance):
    """Decode instance that pauses in the middle of its answer until the test continues it."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def pauses(self, web_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            await self.go.wait()
            return await decodes(web_request, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(web_request)
        await response.write(STREAM[0])
        await self.go.wait()
        await response.write(b"".join(STREAM[1:]))
        return response


@dataclass
class Proxy:
    """Running `epd serve`, the decode instance behind it, and a client."""

    url: str
    process: subprocess.Popen[str]
    decode: Decode
    http: aiohttp.ClientSession

    def ask(self, **more: Any) -> Awaitable[aiohttp.ClientResponse]:
        body = request(text(), **more)
        return asyncio.ensure_future(self.http.post(f"{self.url}/v1/chat/completions", json=body))

    async def ready(self) -> tuple[int, dict[str, Any], str | None]:
        async with self.http.get(f"{self.url}/ready") as reply:
            return reply.status, await reply.json(), reply.headers.get("Connection")

    async def drains(self) -> tuple[int, dict[str, Any], str | None]:
        """Wait until the proxy is not ready; return the answer of `/ready`."""
        async with asyncio.timeout(END_S):
            while (said := await self.ready())[0] == 200:  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(0.01)
        return said

    async def obeys(self) -> None:
        """Wait until the proxy has handled a signal; after SIGINT it may have stopped listening."""
        with suppress(aiohttp.ClientConnectionError):
            await self.drains()

    async def in_flight(self) -> bool:
        """Return whether the metrics show a request in progress."""
        async with self.http.get(f"{self.url}/metrics") as reply:
            return "\nepd_requests_in_flight 1.0\n" in await reply.text()

    async def refuses(self) -> None:
        await until(lambda: refuses_connections(self.url), END_S)

    async def log(self) -> str:
        assert self.process.stderr is not None
        return await asyncio.to_thread(self.process.stderr.read)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, END_S)


@asynccontextmanager
async def proxy(workers: str, *flags: str) -> AsyncIterator[Proxy]:
    encode, decode = FakeInstance(encodes), Decode(hangs)
    decode.chat = decode.pauses
    async with encode.running(), decode.running(), aiohttp.ClientSession() as http:
        urls = ["--encode-servers-urls", encode.url, "--decode-servers-urls", decode.url]
        with serving(*urls, "--workers", workers, *flags) as (url, process):
            running = Proxy(url, process, decode, http)
            while (said := await running.ready())[0] != 200:  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(0.01)
            assert said[1] == {"status": "ready"}  # and the signal handlers are installed
            yield running


def events(raw: bytes) -> list[Any]:
    lines = raw.decode().removesuffix("\n\n").split("\n\n")
    data = [line.removeprefix("data: ") for line in lines]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


@pytest.mark.fault(61)
async def test_a_draining_proxy_fails_its_readiness_and_completes_running_requests(
    workers: str,
) -> None:
    async with proxy(workers, "--drain-delay-s", "6") as running:
        stream = await running.ask(stream=True)
        running.process.terminate()

        said = await running.drains()
        late = await running.ask(stream=True)
        await running.refuses()
        running.decode.go.set()

        status, body, connection = said
        assert (status, body["error"]["code"], connection) == (503, 503, "close")
        assert body["error"]["type"] == "ServiceUnavailableError"
        assert (late.status, late.headers["Connection"]) == (200, "close")
        assert await late.read() == await stream.read() == b"".join(STREAM)
        assert await running.ended() == 0
        assert running.decode.aborted == 0


@pytest.mark.fault(61)
async def test_requests_beyond_the_drain_timeout_get_an_error(workers: str) -> None:
    async with proxy(workers, "--drain-timeout-s", "0.5") as running:
        stream = await running.ask(stream=True)
        whole = running.ask()
        await until(lambda: len(running.decode.calls) == 2, END_S)
        running.process.terminate()

        reply = await whole
        error = (await reply.json())["error"]
        first, last = events(await stream.read())
        assert await running.ended() == 0
        await until(lambda: running.decode.aborted == 2, END_S)
        logged = await running.log()

    assert reply.status == error["code"] == last["error"]["code"] == 503
    assert first["object"] == "chat.completion.chunk"
    assert last["error"]["type"] == error["type"] == "ServiceUnavailableError"
    assert "shutting down" in last["error"]["message"]
    assert reply.headers["x-epd-error"] == "shutting_down"
    assert reply.headers["x-epd-stage"] == "proxy"
    assert reply.headers["Retry-After"] == "1"
    assert {"x-request-id", "connection"} <= {name.lower() for name in reply.headers}
    lines = [orjson.loads(line) for line in logged.splitlines()]
    assert [line.get("error") for line in lines].count("shutting_down") == 2
    assert "Traceback" not in logged


@pytest.mark.fault(61)
async def test_a_body_on_its_way_is_still_read(workers: str) -> None:
    body = json.dumps(request(text())).encode()
    async with proxy(workers) as running:
        running.decode.go.set()
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        raw = post(body, Host="x")
        writer.write(raw[: 10 - len(body)])
        await writer.drain()
        async with asyncio.timeout(END_S):
            while not await running.in_flight():  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(0.05)
        running.process.terminate()
        await running.refuses()
        writer.write(body[10:])
        answer = await asyncio.wait_for(reader.read(), END_S)
        writer.close()

        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()
        assert await running.ended() == 0


async def much(_: web.Request, __: dict[str, Any]) -> web.Response:
    return web.json_response({"choices": [], "filler": "x" * MUCH})


async def floods(web_request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(web_request)
    while True:
        await response.write(STREAM[0] * 1000)


@pytest.mark.fault(61)
async def test_a_client_that_reads_slowly_gets_all_of_its_answer(workers: str) -> None:
    async with proxy(workers) as running:
        running.decode.chat = much
        reply = await running.ask()
        running.process.terminate()
        await running.refuses()
        await asyncio.sleep(0.5)

        async with asyncio.timeout(END_S):
            assert len((await reply.json())["filler"]) == MUCH
        assert await running.ended() == 0


@pytest.mark.fault(61)
@pytest.mark.parametrize("answers", [much, floods])
async def test_a_client_that_does_not_read_does_not_keep_it_from_ending(
    workers: str, answers: Handler
) -> None:
    async with proxy(workers, "--drain-timeout-s", "0.5") as running:
        running.decode.chat = answers
        reply = await running.ask(stream=answers is floods)
        running.process.terminate()

        assert await running.ended() == 0
        await until(lambda: running.decode.aborted == (answers is floods), END_S)
        reply.close()


@pytest.mark.fault(61)
async def test_an_idle_connection_does_not_keep_it_from_ending(workers: str) -> None:
    async with proxy(workers) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            # Not `/ready`: one of two workers may not have probed the instances yet.
            writer.write(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 404")
            running.process.terminate()

            assert await running.ended() == 0


@pytest.mark.fault(61)
async def test_ctrl_c_does_not_wait_for_load_balancers(workers: str) -> None:
    async with proxy(workers, "--drain-delay-s", LONG) as running:
        stream = await running.ask(stream=True)
        running.process.send_signal(signal.SIGINT)
        await running.refuses()
        running.decode.go.set()

        assert await stream.read() == b"".join(STREAM)
        assert await running.ended() == 0


@pytest.mark.fault(62)
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_aborts_running_requests(
    workers: str, first: signal.Signals, second: signal.Signals
) -> None:
    async with proxy(workers, "--drain-delay-s", LONG) as running:
        stream = await running.ask(stream=True)
        whole = running.ask()
        await until(lambda: len(running.decode.calls) == 2, END_S)
        running.process.send_signal(first)
        await running.obeys()  # otherwise both signals could count as one
        assert running.process.poll() is None
        running.process.send_signal(second)

        assert await running.ended() == 0
        await until(lambda: running.decode.aborted == 2, END_S)
        for broken in (whole, stream.read()):
            with pytest.raises(aiohttp.ClientError):
                await broken
        assert "Traceback" not in await running.log()
