import asyncio
import gzip
import io
import json
import math
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from openai import AsyncOpenAI
from pydantic import SecretStr

from epd.tools.observe.counting import Counter, Traffic
from epd.tools.observe.entry_sizes import EntrySizes
from epd.tools.observe.relay import Relay, Server, drop_added_headers
from epd.tools.observe.reuse import ReuseDistances
from tests.requests import image, input_audio, request, text

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CHAT = "/v1/chat/completions"
LIMIT = 4 * 1024 * 1024


@asynccontextmanager
async def relaying(*handlers: Handler, **settings: Any) -> AsyncIterator[tuple[Relay, str]]:
    """Start a server for each handler and a relay before them; yield it and its URL."""
    servers = []
    for handler in handlers:
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", handler)
        servers.append(TestServer(app, handler_cancellation=True))
        await servers[-1].start_server()
    counter = Counter(Traffic(ReuseDistances((math.inf,))))
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        relay = Relay(
            [Server(str(server.make_url("/")).rstrip("/")) for server in servers],
            counter,
            session,
            LIMIT,
            **settings,
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", relay.answer)
        app.on_response_prepare.append(drop_added_headers)
        front = TestServer(app, handler_cancellation=True)
        await front.start_server()
        try:
            yield relay, str(front.make_url("/")).rstrip("/")
        finally:
            await front.close()
            for server in servers:
                await server.close()
            counter.close()


async def raw_answer(url: str, head: bytes, body: bytes = b"") -> bytes:
    """Return the bytes of the answer to a request that asks for the connection's end."""
    _, _, address = url.partition("//")
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + b"Connection: close\r\nHost: h\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def plain(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    seen = {
        "method": request.method,
        "path": request.raw_path,
        "headers": sorted((name.lower(), value) for name, value in request.headers.items()),
        "body": body.decode(),
    }
    response = web.json_response(seen, status=418, reason="Odd")
    response.headers.add("Set-Cookie", "a=1")
    response.headers.add("Set-Cookie", "b=2")
    response.headers["Date"] = "Thu, 01 Jan 1970 00:00:00 GMT"
    return response


def split(answer: bytes) -> tuple[list[bytes], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return sorted(head.split(b"\r\n")), body


async def test_a_request_and_its_answer_pass_unchanged() -> None:
    body = b'{"model": "m"}'
    head = (
        b"POST /v1/x%2Fy?q=%20a HTTP/1.1\r\nX-Odd: 1\r\nX-Odd: 2\r\nAuthorization: Bearer k\r\n"
        b"Content-Type: application/json\r\nContent-Length: 14\r\n"
    )
    async with relaying(plain) as (relay, url):
        direct = split(await raw_answer(relay.servers[0].url, head, body))
        relayed = split(await raw_answer(url, head, body))

    seen_direct, seen = json.loads(direct[1]), json.loads(relayed[1])
    for seen_by_server in (seen_direct, seen):
        seen_by_server["headers"] = [
            header for header in seen_by_server["headers"] if header[0] != "connection"
        ]
    assert relayed[0] == [
        line.replace(b"%d" % len(direct[1]), b"%d" % len(relayed[1])) for line in direct[0]
    ]
    assert seen == seen_direct


async def test_an_answer_without_a_type_gets_none() -> None:
    async def bare(request: web.Request) -> web.StreamResponse:
        response = web.Response(status=204)
        response.headers.pop("Content-Type", None)
        return response

    async with relaying(bare) as (_, url), aiohttp.ClientSession() as http, http.get(url) as reply:
        assert reply.status == 204
        assert "Content-Type" not in reply.headers


async def test_a_stream_arrives_event_by_event() -> None:
    go_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with (
        relaying(stream) as (_, url),
        aiohttp.ClientSession() as http,
        http.post(url + CHAT, json={}) as reply,
    ):
        assert await reply.content.readany() == b"data: 1\n\n"  # before the server goes on
        go_on.set()
        assert await reply.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_counter_gets_the_end_of_the_answer(*, streamed: bool) -> None:
    usage = {"usage": {"prompt_tokens_details": {"multimodal_tokens": {"audio": 7}}}}

    async def vllm(request: web.Request) -> web.StreamResponse:
        if not streamed:
            return web.json_response({"choices": "c" * 10_000, **usage})
        response = web.StreamResponse()
        await response.prepare(request)
        for event in ("c" * 10_000, json.dumps(usage), "[DONE]"):
            await response.write(f"data: {event}\n\n".encode())
        return response

    async with relaying(vllm) as (relay, url), aiohttp.ClientSession() as http:
        traffic = relay.counter.traffic
        traffic.sizes = EntrySizes(10.0, token_pixels=0.0, fixed_tokens=0.0)
        async with http.post(url + CHAT, json=request(input_audio())) as reply:
            await reply.read()
        relay.counter.close()

    assert (traffic.unsized, traffic.mean_bytes) == (0, 70)


async def test_a_client_that_leaves_ends_its_request() -> None:
    ended = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with relaying(hang) as (relay, url), aiohttp.ClientSession() as http:
        with suppress(TimeoutError):
            await http.post(url + CHAT, json=request(image()), timeout=aiohttp.ClientTimeout(0.3))
        await asyncio.wait_for(ended.wait(), 5)
        assert relay.servers[0].in_progress == 0
        relay.counter.close()
        assert relay.counter.traffic.with_media == 1


async def test_a_cut_off_answer_does_not_look_complete() -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with relaying(broken) as (relay, url), aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientError):
            async with http.post(url + CHAT, json={}) as reply:
                await reply.read()
        assert relay.failed == 1


async def test_a_server_that_is_gone_is_answered_for_in_the_openai_shape() -> None:
    async with relaying(plain) as (relay, url), aiohttp.ClientSession() as http:
        relay.servers[0].url = f"http://127.0.0.1:{unused_port()}"
        async with http.post(url + CHAT, json={}) as reply:
            assert reply.status == 502
            assert (await reply.json())["error"]["message"] == "the vLLM server did not answer"


async def test_requests_go_to_the_server_with_the_fewest_in_progress() -> None:
    arrived: list[int] = []
    all_arrived, release = asyncio.Event(), asyncio.Event()

    def numbered(number: int) -> Handler:
        async def handler(_: web.Request) -> web.StreamResponse:
            arrived.append(number)
            if len(arrived) == 6:
                all_arrived.set()
            await release.wait()
            return web.Response()

        return handler

    async with relaying(numbered(0), numbered(1)) as (_, url), aiohttp.ClientSession() as http:
        asked = [asyncio.ensure_future(http.get(url)) for _ in range(6)]
        await all_arrived.wait()
        release.set()
        await asyncio.gather(*asked)

    assert sorted(arrived) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("over", [0, 1])
async def test_a_body_over_the_limit_is_relayed_and_not_counted(
    over: int, *, chunked: bool
) -> None:
    async def length(request: web.Request) -> web.StreamResponse:
        return web.Response(text=str(len(await request.read())))

    body = json.dumps(request(image(b"x"))).encode()
    body += b" " * (LIMIT + over - len(body))

    async def parts() -> AsyncIterator[bytes]:
        yield body[:1000]
        yield body[1000:]

    async with relaying(length) as (relay, url), aiohttp.ClientSession() as http:
        headers = {"Content-Type": "application/json"}
        async with http.post(
            url + CHAT, data=parts() if chunked else io.BytesIO(body), headers=headers
        ) as reply:
            assert await reply.text() == str(LIMIT + over)
        relay.counter.close()

    assert relay.too_large == over
    assert relay.counter.traffic.requests == 1 - over


@pytest.mark.parametrize(
    "answer", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
)
async def test_an_invalid_answer_is_an_error_in_the_openai_shape(answer: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with (
        relaying(plain) as (relay, url),
        await asyncio.start_server(speak, "127.0.0.1", 0) as server,
        aiohttp.ClientSession() as http,
    ):
        relay.servers[0].url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with http.get(url + "/health") as reply:
            assert reply.status == 502
            assert "error" in await reply.json()
        assert relay.failed == 1


async def test_a_request_line_without_a_path_is_refused() -> None:
    async with relaying(plain) as (_, url):
        answer = await raw_answer(url, b"GET http://other/x HTTP/1.1\r\n")

    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        ({}, {}, 403),
        ({"private": True}, {}, 200),
        ({"private": True}, {"X-Forwarded-For": "1.2.3.4"}, 403),
        ({"admin_key": SecretStr("k")}, {}, 401),
        ({"private": True, "admin_key": SecretStr("k")}, {}, 401),
        ({"admin_key": SecretStr("k")}, {"X-API-Key": "k"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/observe", "/observe.json"])
async def test_reports_are_for_the_operator(
    settings: dict[str, Any], headers: dict[str, str], status: int, path: str
) -> None:
    async with (
        relaying(plain, **settings) as (_, url),
        aiohttp.ClientSession() as http,
        http.get(url + path, headers=headers) as reply,
    ):
        assert reply.status == status


async def test_the_command_relays_an_official_client_and_reports(tmp_path: Path) -> None:
    completion = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "a cat"},
            }
        ],
    }

    async def vllm(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Content-Encoding") == "gzip":
            return web.json_response({"cookie": len(request.headers["Cookie"])})
        return web.json_response(completion)

    async def models(_: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "m", "root": str(tmp_path)}]})

    config = {"hidden_size": 3584, "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    app = web.Application(client_max_size=0)
    app.router.add_post(CHAT, vllm)
    app.router.add_get("/v1/models", models)
    server = TestServer(app)
    await server.start_server(max_field_size=1 << 16, auto_decompress=False)
    port = unused_port()
    report = tmp_path / "report.json"
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epd", "observe", "--servers-urls", str(server.make_url("/"))),
        *("--port", str(port), "--report", str(report)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert command.stdout is not None
    try:
        await asyncio.wait_for(command.stdout.readuntil(b"Ctrl-C\n"), 60)
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
            for _ in range(3):
                body: Any = request(image(b"p" * 20_000), text())
                answer = await client.chat.completions.create(**body)
                assert answer.choices[0].message.content == "a cat"
        odd = {"Content-Encoding": "gzip", "Cookie": "c" * 9000, "Content-Type": "text/plain"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"http://127.0.0.1:{port}{CHAT}", data=gzip.compress(b"a" * 99), headers=odd
            ) as reply,
        ):
            assert await reply.json() == {"cookie": 9000}
        command.send_signal(signal.SIGTERM)
        printed, _ = await asyncio.wait_for(command.communicate(), 60)
    finally:
        if command.returncode is None:
            command.kill()
        await server.close()

    assert command.returncode == 0
    assert b"67% of the media came again. A store of 1 GiB would have" in printed
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["items"], found["relayed"]["failed"]) == (3, 0)
