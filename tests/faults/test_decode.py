"""Rows 4, 5, 34 and 37 to 39: faults of decode instances that must not reach the client."""

import asyncio
import socket
import threading
from typing import Any

import pytest
from aiohttp import web

from tests.faults.scripted import STREAM_HEAD, Scripted, chunked, hold, read_request, reset, send
from tests.requests import image, request, text
from tests.support.fake_instance import STREAM, refuses
from tests.support.fleet import Launch, until

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
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup, end = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *args: Any, **more: Any) -> Any:
        if host == "slow.test":
            end.wait()
        return lookup(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with launch() as up:
        urls = ("http://slow.test:1", up.d.url)
        async with launch(decode_servers_urls=urls, connect_timeout_s=0.3) as fleet:
            for _ in range(2):
                assert (await asyncio.wait_for(fleet.chat(request(text())), 20))[0] == 200
    end.set()


async def test_models_are_requested_from_a_reachable_instance(launch: Launch) -> None:
    async with launch() as up, launch(decode_servers_urls=(NOBODY, up.d.url)) as fleet:
        for _ in range(4):
            async with fleet.http.get(f"{fleet.url}/v1/models") as reply:
                assert reply.status == 200


@pytest.mark.fault(8, 12)
@pytest.mark.parametrize("modality", [["image"], {}, 7])
async def test_an_unknown_modality_is_refused(launch: Launch, modality: Any) -> None:
    two = {key: {"modality": modality, "metadata": {}} for key in "ab"}

    async def chat(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [], "ec_transfer_params": two})

    async with launch() as fleet:
        fleet.e.chat = chat
        async with fleet.post(request(image())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (502, "encode_metadata")


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
