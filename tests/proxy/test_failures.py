"""Failures of instances as the client sees them, and disconnects as the instances see them."""

import asyncio
from typing import Any

import openai
import pytest
from aiohttp import ClientTimeout, web
from yarl import URL

from tests.requests import image, request, text
from tests.support.fake_instance import (
    Handler,
    after,
    chunk,
    decodes,
    drops,
    hangs,
    refuses,
    streams_then,
)
from tests.support.fleet import Launch, until


async def answers_junk(_: web.Request, __: dict[str, Any]) -> web.Response:
    return web.Response(text="<html>oops", content_type="text/html")


async def crashes(_: web.Request, __: dict[str, Any]) -> web.Response:
    return web.Response(status=500, text="Traceback: /secret/path")


def check_error(
    reply: dict[str, Any], *, code: int, kind: str | None = None, param: str | None = None
) -> None:
    assert set(reply) == {"error"}
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["param"] == param
    assert error["message"]
    assert kind in {None, error["type"]}
    assert "/secret" not in error["message"]
    assert "127.0.0.1" not in error["message"]


@pytest.mark.parametrize(
    ("fault", "status", "slug"),
    [
        (crashes, 502, "encode_failed"),
        (drops, 502, "encode_failed"),
        (answers_junk, 502, "encode_bad_response"),
        (hangs, 504, "encode_timeout"),
        (refuses(400), 400, "encode_rejected"),
        (refuses(422), 422, "encode_rejected"),
        (refuses(429), 503, "encode_overloaded"),
        (refuses(503), 503, "encode_overloaded"),
    ],
)
async def test_a_failing_encoder_ends_in_one_clear_error(
    launch: Launch, fault: Handler, status: int, slug: str
) -> None:
    timeout_s = 0.2 if fault is hangs else 30
    async with launch(encode_timeout_s=timeout_s, on_encode_failure="fail") as fleet:
        fleet.e.chat = fault
        async with fleet.post(request(text(), image())) as reply:
            assert reply.status == status
            assert reply.headers["x-epd-stage"] == "encode"
            assert reply.headers["x-epd-error"] == slug
            check_error(await reply.json(), code=status, param="messages[0].content[1]")
        assert fleet.d.calls == []
        assert [event.error for event in fleet.events.requests] == [slug]


async def test_decodes_error_in_another_shape_is_made_openais(launch: Launch) -> None:
    async def not_found(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    async with launch() as fleet:
        fleet.d.chat = not_found
        status, reply = await fleet.chat(request(text()))

        assert status == 404
        check_error(reply, code=404)
        assert reply["error"]["message"] == "Not Found"


@pytest.mark.fault(40)
async def test_an_error_event_of_decode_is_passed_on(launch: Launch) -> None:
    error = b'data: {"error": {"message": "late"}}\n\n'
    async with launch() as fleet:
        for events in ((error, b"data: [DONE]\n\n"), (error,)):
            fleet.d.chat = streams_then(*events)
            async with fleet.post(request(text(), stream=True)) as reply:
                assert await reply.read() == b"".join(events)


@pytest.mark.fault(39)
async def test_the_official_client_sees_a_broken_stream(launch: Launch) -> None:
    async with (
        launch() as fleet,
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="k", max_retries=0) as client,
    ):
        fleet.d.chat = streams_then(chunk("a"))
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="before its last event"):
            [event async for event in stream]


@pytest.mark.parametrize("status", [200, 500])
async def test_a_decode_that_stops_in_its_answer_is_an_error(launch: Launch, status: int) -> None:
    async def half(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b"{")
        await asyncio.sleep(60)
        return response

    async with launch(idle_timeout_s=0.2) as fleet:
        fleet.d.chat = half
        got, reply = await asyncio.wait_for(fleet.chat(request(text())), 20)

        assert got == 504
        check_error(reply, code=504)


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
async def test_redirects_are_not_followed(launch: Launch, role: str) -> None:
    fail: Any = {"on_encode_failure": "fail", "on_prefill_failure": "fail"}
    async with launch(prefill=1, **fail) as fleet:

        async def elsewhere(_: web.Request, __: dict[str, Any]) -> web.Response:
            return web.Response(status=307, headers={"Location": fleet.d.url + "/v1/models"})

        getattr(fleet, role)[0].chat = elsewhere
        status, reply = await fleet.chat(request(image()))

        assert status == 502
        assert reply["error"]["code"] == 502
        assert fleet.d.other_calls == []


async def test_100_concurrent_requests_reach_decode_together(launch: Launch) -> None:
    go_on = asyncio.Event()

    async with launch() as fleet:
        fleet.d.chat = after(go_on, decodes)
        chats = [asyncio.create_task(fleet.chat(request(text()))) for _ in range(100)]
        await until(lambda: len(fleet.d.calls) == len(chats))
        go_on.set()

        assert {status for status, _ in await asyncio.gather(*chats)} == {200}


@pytest.mark.security("S19")
async def test_a_rejection_by_an_instance_is_logged_without_its_text(launch: Launch) -> None:
    async with launch() as fleet:
        fleet.d.chat = refuses(400, "you wrote PRIVATE-PROMPT")
        await fleet.chat(request(text()))
        async with fleet.http.get(f"{fleet.url}/v1/%1b[31mFAKE") as reply:
            assert reply.status == 404

        rejected, unknown = fleet.events.requests
        assert (rejected.error, rejected.reason) == (
            "decode_rejected",
            "the decode instance answered 400 BadRequestError",
        )
        assert (unknown.path, unknown.reason) == ("unknown", "there is no such route")


async def test_a_404_names_the_path_and_openapi_json(
    launch: Launch,
) -> None:
    async with launch() as fleet:
        for path in ("/docs", "/v1/%1b[31m"):
            async with fleet.http.get(URL(fleet.url + path, encoded=True)) as reply:
                error = (await reply.json())["error"]

            assert reply.status == 404
            assert error["message"] == f"there is no {path}: GET /openapi.json describes all routes"
        async with fleet.http.get(f"{fleet.url}/{'x' * 5000}") as reply:
            assert len((await reply.json())["error"]["message"]) < 300


async def test_a_wrong_method_is_logged_with_the_path_of_its_route(launch: Launch) -> None:
    async with launch() as fleet:
        for method, path, allowed in (
            ("GET", "/v1/chat/completions", "POST"),
            ("PUT", "/v1/media/cat", "DELETE"),
        ):
            async with fleet.http.request(method, f"{fleet.url}{path}") as reply:
                message = (await reply.json())["error"]["message"]
                assert (reply.status, message) == (405, f"this route accepts only {allowed}")
        paths = [one.path for one in fleet.events.requests]

    assert paths == ["/v1/chat/completions", "/v1/media/{uuid}"]


async def test_a_body_that_does_not_come(launch: Launch) -> None:
    async with launch(body_timeout_s=0.2) as fleet:
        host, port = fleet.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()

        assert head.startswith(b"HTTP/1.1 408")
        assert b"x-epd-error: body_timeout" in head


async def test_a_slow_client_does_not_time_out_the_stream(launch: Launch) -> None:
    async with launch() as fleet:
        fleet.d.chat = streams_then(*[chunk("x" * 1000)] * 20, b"data: [DONE]\n\n")
        body = request(text(), stream=True)
        url = f"{fleet.url}/v1/chat/completions"
        async with fleet.http.post(url, json=body, timeout=ClientTimeout(total=30)) as reply:
            await asyncio.sleep(0.3)
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")
