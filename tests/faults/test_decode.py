"""Rows 4, 5, 34 and 37 to 39: faults of decode instances that must not reach the client."""

import asyncio
from contextlib import closing, suppress
from typing import Any

import pytest
from aiohttp import web

from tests.faults.scripted import (
    STREAM_HEAD,
    Scripted,
    answer,
    chunked,
    hold,
    read_request,
    reset,
    send,
)
from tests.requests import request, text
from tests.support.fake_instance import STREAM, decodes, drops, hangs, refuses
from tests.support.fleet import Launch, until
from tests.support.system_names import SystemNames

NOBODY = "http://127.0.0.1:9"


@pytest.mark.fault(37, 38, 39)
@pytest.mark.parametrize("end", [reset(), hold()])
async def test_a_failure_after_the_end_of_a_stream_has_no_effect(launch: Launch, end: Any) -> None:
    whole = b"".join(STREAM)
    script = [read_request(), send(STREAM_HEAD + chunked(whole)), end]
    decode = Scripted(script)
    async with decode.running(), launch(decode_servers_urls=(decode.url,)) as fleet:
        async with fleet.post(request(text(), stream=True)) as reply:
            assert await asyncio.wait_for(reply.read(), 20) == whole

        await until(lambda: fleet.events.requests)
        assert [event.error for event in fleet.events.requests] == [None]


@pytest.mark.fault(45)
async def test_a_client_that_leaves_when_it_has_all_has_not_left_early(launch: Launch) -> None:
    script = [read_request(), send(STREAM_HEAD + chunked(b"".join(STREAM))), hold()]
    decode = Scripted(script)
    async with decode.running(), launch(decode_servers_urls=(decode.url,)) as fleet:
        async with fleet.post(request(text(), stream=True)) as reply:
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")
        await fleet.http.close()

        await until(lambda: fleet.events.requests)
        [done] = fleet.events.requests
        assert (done.status, done.error) == (200, None)
        await until(lambda: decode.aborted)


@pytest.mark.fault(34)
@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_of_an_overloaded_decode_reaches_the_client(
    launch: Launch, status: int
) -> None:
    async with launch() as fleet:
        fleet.d.chat = refuses(status)
        async with fleet.post(request(text())) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (status, "1")


@pytest.mark.fault(5)
async def test_a_hanging_name_lookup_is_retried_on_another_instance(
    launch: Launch, system: SystemNames
) -> None:
    system.hanging = "slow.test"
    async with launch() as up:
        urls = ("http://slow.test:1", up.d.url)
        async with launch(decode_servers_urls=urls) as fleet:
            for _ in range(2):
                assert (await asyncio.wait_for(fleet.chat(request(text())), 20))[0] == 200
        system.go_on()


async def test_models_are_requested_from_a_reachable_instance(launch: Launch) -> None:
    async with launch() as up, launch(decode_servers_urls=(NOBODY, up.d.url)) as fleet:
        for _ in range(4):
            async with fleet.http.get(f"{fleet.url}/v1/models") as reply:
                assert reply.status == 200


@pytest.mark.fault(31)
async def test_params_of_any_depth_raise_no_internal_error(launch: Launch) -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}

    async def chat(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [], "kv_transfer_params": deep})

    async with launch(prefill=1, on_prefill_failure="fail") as fleet:
        fleet.p.chat = chat
        async with fleet.post(request(text())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (502, "prefill_bad_response")


@pytest.mark.fault(119)
@pytest.mark.parametrize(
    ("status", "slug"),
    [(200, "decode_bad_response"), (404, "decode_rejected"), (501, "decode_failed")],
)
async def test_a_page_of_html_does_not_reach_the_client(
    launch: Launch, status: int, slug: str
) -> None:
    async def page(_: web.Request, __: dict[str, Any]) -> web.Response:
        html = "<!DOCTYPE HTML><html><body><h1>Error</h1></body></html>"
        return web.Response(text=html, status=status, content_type="text/html")

    async with launch(decode=1) as fleet:
        fleet.d.chat = page
        async with fleet.post(request(text())) as reply:
            body = await reply.json()

            assert reply.status == (502 if status == 200 else status)
            assert reply.headers["x-epd-error"] == slug
            assert "<" not in body["error"]["message"]


@pytest.mark.fault(36)
async def test_the_rest_of_a_body_is_not_sent_after_an_instance_has_rejected_it(
    launch: Launch,
) -> None:
    size, received = 40_000_000, 0

    async def rejects(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        with closing(writer):
            if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /health"):
                return
            reply = answer(b"too large", 413)
            head_end = reply.index(b"\r\n\r\n") + 4
            writer.write(reply[:head_end])
            with suppress(TimeoutError):  # the proxy has stopped
                while part := await asyncio.wait_for(reader.read(1_000_000), 1):
                    received += len(part)
            writer.write(reply[head_end:])

    server = await asyncio.start_server(rejects, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    config: Any = {"decode_servers_urls": (url,), "max_text_bytes": 2 * size}
    async with server, launch(**config) as fleet:
        status, _ = await fleet.chat(request(text("a" * size)))

        assert status == 413
    assert 0 < received < size


@pytest.mark.fault(5)
async def test_a_refused_connection_marks_an_instance_down_and_a_reset_does_not(
    launch: Launch,
) -> None:
    async with launch(decode=2, decode_balance="round_robin", probe_interval_s=60) as fleet:
        await until(lambda: all(instance.probes for instance in fleet.decode))
        fleet.d.chat = drops
        for _ in range(4):
            assert (await fleet.chat(request(text())))[0] == 200
        assert fleet.events.changes == []

        await fleet.d.stop_listening()
        for _ in range(4):
            assert (await fleet.chat(request(text())))[0] == 200
        [change] = fleet.events.changes
        assert (change.instance, change.state) == (fleet.d.url, "down")
        assert change.cause == "connection refused"
        async with fleet.http.get(f"{fleet.url}/health") as reply:
            shown = (await reply.json())["instances"][fleet.d.url]
        assert shown["state"] == "down"


@pytest.mark.fault(5)
@pytest.mark.parametrize("seen_by", ["request", "health"])
async def test_health_and_the_page_agree_that_the_only_instance_is_down(
    launch: Launch, seen_by: str
) -> None:
    async with launch(probe_interval_s=60) as fleet:
        await until(lambda: bool(fleet.d.probes))
        await fleet.d.stop_listening()
        if seen_by == "request":
            assert (await fleet.chat(request(text())))[0] == 502
        async with fleet.http.get(f"{fleet.url}/health") as reply:
            health = (await reply.json())["instances"][fleet.d.url]
        async with fleet.http.get(f"{fleet.url}/ui/state") as reply:
            [shown] = [
                one for one in (await reply.json())["instances"] if one["url"] == fleet.d.url
            ]

        assert health["state"] == shown["state"] == "down"
        assert shown["cause"] == "connection refused"


@pytest.mark.fault(5)
async def test_an_instance_that_dies_with_its_idle_connections_is_down_at_once(
    launch: Launch,
) -> None:
    idle: list[Any] = []

    async def answers(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        idle.append(http.transport)
        return await decodes(http, body)

    async with launch(decode=2, decode_balance="round_robin", probe_interval_s=60) as fleet:
        fleet.d.chat = answers
        for _ in range(2):
            assert (await fleet.chat(request(text())))[0] == 200
        await fleet.d.stop_listening()
        for connection in idle:
            connection.abort()
        for _ in range(2):
            assert (await fleet.chat(request(text())))[0] == 200

        assert [one.cause for one in fleet.events.changes] == ["connection refused"]


async def test_an_error_after_a_retry_names_the_first_failure_too(launch: Launch) -> None:
    """The message of the instance is not repeated."""
    faults = iter([refuses(500, "secret"), hangs])

    async def fails(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await next(faults)(http, body)

    async with launch(decode=2, first_byte_timeout_s=0.3) as fleet:
        for instance in fleet.decode:
            instance.chat = fails
        status, answer = await fleet.chat(request(text(), stream=True))

    assert status == 504
    assert answer["error"]["message"].endswith(
        "; the first attempt failed: the decode instance answered 500"
    )
