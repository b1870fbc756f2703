"""Reload during requests: each request keeps the configuration with which it started."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from epd.server.app_keys import ADMISSION, CONFIG
from tests.requests import image, request, text
from tests.support.fake_instance import Handler
from tests.support.fleet import Fleet, Launch, until


def reload(fleet: Fleet, **settings: Any) -> None:
    live = fleet.runner.app[CONFIG]
    live.apply_config(live.current.model_copy(update=settings))


class Held:
    """Handler that waits for the test before it answers."""

    def __init__(self, usual: Handler) -> None:
        self.usual = usual
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.began.set()
        await self.go_on.wait()
        return await self.usual(http, body)


@pytest.fixture
def picture() -> dict[str, Any]:
    return request(image(), text())


async def test_decode_requests_follow_the_configuration_at_their_arrival(
    launch: Launch, picture: dict[str, Any]
) -> None:
    async with launch(decode_media="metadata") as fleet:
        fleet.e.chat = held = Held(fleet.e.chat)
        first = asyncio.create_task(fleet.chat(picture))
        await held.began.wait()
        reload(fleet, decode_media="raw")
        held.go_on.set()
        assert (await first)[0] == 200
        assert (await fleet.chat(picture))[0] == 200

    kept, new = (call.body["messages"] for call in fleet.d.calls)
    sent = picture["messages"][0]["content"][0]["image_url"]["url"]
    assert sent not in json.dumps(kept)
    assert sent in json.dumps(new)


async def test_time_limits_are_those_of_when_the_request_came(
    launch: Launch, picture: dict[str, Any]
) -> None:
    async def late(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return await usual(http, body)

    async with launch(first_byte_timeout_s=20) as fleet:
        usual, fleet.d.chat = fleet.d.chat, late
        fleet.e.chat = held = Held(fleet.e.chat)
        first = asyncio.create_task(read(fleet, picture))
        await held.began.wait()
        reload(fleet, first_byte_timeout_s=0.05)
        held.go_on.set()

        assert await first == 200
        assert await read(fleet, picture) == 504


async def test_retries_follow_the_configuration_at_the_requests_arrival(
    launch: Launch, picture: dict[str, Any]
) -> None:
    async def refuses(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({}, status=500)

    async with launch(on_encode_failure="local") as fleet:
        fleet.e.chat = held = Held(refuses)
        first = asyncio.create_task(fleet.chat(picture))
        await held.began.wait()
        reload(fleet, on_encode_failure="fail")
        held.go_on.set()

        assert (await first)[0] == 200
        assert (await fleet.chat(picture))[0] == 502


async def test_policies_are_those_of_when_the_request_came(launch: Launch) -> None:
    came, go_on = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        whole = json.dumps(request(text())).encode()
        yield whole[:1]
        came.set()
        await go_on.wait()
        yield whole[1:]

    async with launch(prefill=1) as fleet:

        async def slow() -> int:
            async with fleet.http.post(
                f"{fleet.url}/v1/chat/completions",
                data=body(),
                headers={"Content-Type": "application/json"},
            ) as reply:
                return reply.status

        first = asyncio.create_task(slow())
        await came.wait()
        await until(lambda: fleet.runner.app[ADMISSION].door.inside)
        reload(fleet, skip_prefill_for_text=True, policies=("pd_only", "encode_prefill_decode"))
        status, _ = await fleet.chat(request(text()))
        assert (status, len(fleet.p.calls)) == (200, 0)

        go_on.set()
        assert (await first, len(fleet.p.calls)) == (200, 1)


async def read(fleet: Fleet, body: dict[str, Any]) -> int:
    async with fleet.post({**body, "stream": True}) as reply:
        await reply.read()
        return reply.status
