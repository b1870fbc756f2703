"""Row 76: media URLs that engines cannot fetch."""

import asyncio
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from epd.request.encode import Encoder
from epd.server import app as proxy_app
from tests.requests import image, request, text
from tests.support.fake_instance import Handler, decodes, encodes, fails_first, hangs, refuses
from tests.support.fleet import Launch

pytestmark = pytest.mark.fault(76)

DEAD = "https://dead.example.com/x.png"

SAID = [
    "Cannot connect to host dead.example.com:443 ssl:default [Name or service not known]",
    "",  # a timeout in vLLM 0.32
]
"""Messages of vLLM 0.32's status 500 if a host has no address, or is late."""

ENGINES = ["Internal server error", "EngineCore encountered an issue. See stack trace (above)"]


@pytest.mark.parametrize("said", SAID)
async def test_a_failed_fetch_is_the_requests_own_error(launch: Launch, said: str) -> None:
    async with launch(encode=3, decode=2) as fleet:
        for instance in fleet.instances:
            instance.chat = refuses(500, said)
        async with fleet.post(request(text(), image(DEAD))) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, reply.headers["x-epd-error"]) == (422, "media_fetch_failed")
            assert reply.headers["x-epd-stage"] == "encode"
            assert error["type"] == "UnprocessableEntityError"
            assert error["param"] == "messages[0].content[1]"
            assert "dead.example.com" not in error["message"]  # neither the host nor its address

        assert sum(len(one.calls) for one in fleet.encode) == 2  # one retry
        assert sum(len(one.calls) for one in fleet.decode) == 0


async def test_dead_urls_eject_no_instance_and_harm_no_other_request(launch: Launch) -> None:
    async def fetches(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        return await (refuses(500, SAID[0]) if url == DEAD else encodes)(request, body)

    async with launch(encode=2, decode=2, eject_after=3) as fleet:
        for instance in fleet.encode:
            instance.chat = fetches
        bodies = [request(text(str(number)), image(DEAD)) for number in range(12)]
        dead = asyncio.gather(*(fleet.chat(body) for body in bodies))
        good = [await fleet.chat(request(image(b"%d" % number))) for number in range(6)]

        assert {status for status, _ in await dead} == {422}
        assert {status for status, _ in good} == {200}
        assert fleet.events.changes == []
        assert {one.rejected for one in fleet.events.stages if one.error} == {True}
        async with fleet.http.get(f"{fleet.url}/metrics") as page:
            figures = await page.text()
        assert 'failed="true"' not in figures  # the alert EpdStageFails counts these
        assert 'failed="rejected",model_name="m",stage="encode"' in figures


async def test_a_failed_media_fetch_is_retried_at_one_more_instance(launch: Launch) -> None:
    async with launch(encode=2, encode_balance="round_robin") as fleet:
        fleet.encode[0].chat = refuses(500, SAID[0])
        async with fleet.post(request(image(DEAD))) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-items"] == "hit=0,encoded=1,local=0"

        assert [len(one.calls) for one in fleet.encode] == [1, 1]


@pytest.fixture
def late_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a fetch that failed after 0.2 s for one that the instance has already retried."""
    monkeypatch.setattr(proxy_app, "Encoder", partial(Encoder, _fetch_again_s=0.2))


@pytest.mark.usefixtures("late_soon")
async def test_a_fetch_that_failed_late_is_not_repeated(launch: Launch) -> None:
    async def late(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.4)
        return await refuses(500, SAID[0])(request, body)

    async with launch(encode=2) as fleet:
        for instance in fleet.encode:
            instance.chat = late
        assert (await fleet.chat(request(image(DEAD))))[0] == 422
        assert sum(len(one.calls) for one in fleet.encode) == 1


@pytest.mark.usefixtures("late_soon")
async def test_a_hanging_media_host_ends_in_the_encode_timeout_without_blame(
    launch: Launch,
) -> None:
    async with launch(encode=2, encode_timeout_s=0.3, eject_after=1) as fleet:
        for instance in fleet.encode:
            instance.chat = hangs
        async with fleet.post(request(image(DEAD))) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (422, "media_fetch_failed")

        assert sum(len(one.calls) for one in fleet.encode) == 1
        assert fleet.d.calls == []
        assert fleet.events.changes == []


@pytest.mark.parametrize("said", ENGINES)
async def test_an_engines_own_failure_is_still_its_own(launch: Launch, said: str) -> None:
    async with launch(encode=2, encode_balance="round_robin", eject_after=1) as fleet:
        fleet.encode[0].chat = refuses(500, said)
        assert (await fleet.chat(request(image(DEAD))))[0] == 200
        assert [one.state for one in fleet.events.changes] == ["ejected"]


async def text_error(_: web.Request, __: dict[str, Any]) -> web.Response:
    return web.Response(status=500, text="Internal Server Error")


@pytest.mark.parametrize("fault", [refuses(502), refuses(503), text_error])
async def test_a_gateway_error_is_not_a_failed_fetch(launch: Launch, fault: Handler) -> None:
    async with launch(encode=2, encode_balance="round_robin") as fleet:
        fleet.encode[0].chat = fault
        async with fleet.post(request(image(DEAD))) as reply:
            assert reply.status == 200
            assert "x-epd-degraded" not in reply.headers


async def test_a_500_of_media_that_the_request_has_is_the_instances(launch: Launch) -> None:
    async with launch(encode=1, on_encode_failure="fail") as fleet:
        fleet.e.chat = refuses(500, SAID[0])
        async with fleet.post(request(image())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (502, "encode_failed")


@pytest.mark.parametrize("prefill", [0, 1])
async def test_prefill_and_decode_are_not_blamed_for_media_they_cannot_fetch(
    launch: Launch, prefill: int
) -> None:
    config: Any = {"encode_servers_urls": (), "eject_after": 1}
    async with launch(encode=0, prefill=prefill, **config) as fleet:
        consumer = fleet.p if prefill else fleet.d
        consumer.chat = refuses(500, SAID[0])
        async with fleet.post(request(text(), image(DEAD))) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (422, "media_fetch_failed")
            assert reply.headers["x-epd-stage"] == ("prefill" if prefill else "decode")

        assert len(consumer.calls) == 1
        assert fleet.events.changes == []


async def test_the_log_line_shows_nothing_of_the_url(launch: Launch) -> None:
    async with launch() as fleet:
        fleet.e.chat = fails_first(2, refuses(500, SAID[0]), decodes)
        with capture_logs() as logs:
            await fleet.chat(request(image(DEAD)))

        assert "dead.example" not in str(logs)
