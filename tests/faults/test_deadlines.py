"""Deadline of the whole request, set by the operator and by the client."""

import asyncio
from typing import Any

import pytest

from tests.requests import image, request, text
from tests.support.fake_instance import chunk, hangs, streams_then
from tests.support.fleet import Launch, until


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
async def test_a_request_ends_at_its_deadline_in_every_wait(launch: Launch, role: str) -> None:
    async with launch(prefill=1, request_timeout_s=1.0) as fleet:
        instance = getattr(fleet, role)[0]
        instance.chat = hangs
        async with fleet.post(request(image())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (504, "request_timeout")
            assert (await reply.json())["error"]["type"] == "GatewayTimeoutError"

        await until(lambda: instance.aborted)
        assert fleet.events.changes == []  # the instance was not late


async def test_a_stream_that_lasts_too_long_ends_in_an_error_event(launch: Launch) -> None:
    async with launch(request_timeout_s=1.0) as fleet:
        fleet.d.chat = streams_then(chunk("a"), then=hangs)
        async with fleet.post(request(text(), stream=True)) as reply:
            assert reply.status == 200
            events = await reply.read()

        assert events.startswith(chunk("a"))
        assert b'"code":504' in events
        assert b"[DONE]" not in events
        await until(lambda: fleet.d.aborted)
        assert [event.error for event in fleet.events.requests] == ["request_timeout"]


async def test_a_client_can_only_shorten_it(launch: Launch) -> None:
    async with launch(request_timeout_s=1.0) as fleet:
        fleet.d.chat = hangs
        async with fleet.post(request(text()), {"x-request-timeout": "3600"}) as reply:
            assert reply.status == 504

    async with launch() as fleet:
        fleet.d.chat = hangs
        async with fleet.post(request(text()), {"x-request-timeout": "0.2"}) as reply:
            assert reply.status == 504


async def test_the_wait_for_its_turn_is_a_part_of_it(launch: Launch) -> None:
    async with launch(max_requests=1) as fleet:
        fleet.d.chat = hangs
        first = asyncio.create_task(fleet.chat(request(text())))
        await until(lambda: fleet.d.calls)
        async with fleet.post(request(text()), {"x-request-timeout": "0.3"}) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (504, "request_timeout")

        assert len(fleet.d.calls) == 1
        first.cancel()


@pytest.mark.parametrize("wrong", ["", "soon", "-1", "nan", "inf", "1e9", "9" * 400, "0x1"])
async def test_an_invalid_timeout_is_ignored(launch: Launch, wrong: Any) -> None:
    headers = {"x-request-timeout": wrong}
    async with launch() as fleet, fleet.post(request(text()), headers) as reply:
        assert reply.status == 200
