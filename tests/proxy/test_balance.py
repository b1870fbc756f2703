"""Balancing on real sockets: by reported and known load, by weight, by session."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from epd.discovery.polling import MAX_PAGE_BYTES
from epd.routing.instances import Role
from tests.requests import image, request, text
from tests.support.fake_instance import FakeInstance, after, decodes, reports
from tests.support.fleet import Fleet, Launch, until
from tests.support.registration import ADMIN, KEY, empty, listing, register, taking_part

Metrics = Callable[[], Awaitable[web.Response]]
OFTEN: dict[str, Any] = {"load_interval_s": 0.05, "admin_api_key": KEY}
ENDLESS = 100 * 1024**2


async def reported(fleet: Fleet) -> dict[str, Any]:
    """Return by URL the reported load that the proxy uses."""
    rows = (await listing(fleet))["instances"]
    return {row["url"]: row["reported"] for row in rows}


async def known(fleet: Fleet, instance: FakeInstance, *, waiting: int, running: int) -> None:
    """Wait until the proxy uses this report of an instance."""
    report = {"waiting": waiting, "running": running}
    async with asyncio.timeout(20):
        while (await reported(fleet))[instance.url] != report:  # noqa: ASYNC110 - as in `until`
            await asyncio.sleep(0.01)


async def had(fleet: Fleet, requests: int, headers: dict[str, str] | None = None) -> list[int]:
    """Send `requests` requests; return how many each decode instance received."""
    before = [len(one.calls) for one in fleet.decode]
    for _ in range(requests):
        status, _ = await fleet.chat(request(text()), headers)
        assert status == 200
    return [len(one.calls) - calls for one, calls in zip(fleet.decode, before, strict=True)]


@asynccontextmanager
async def held(fleet: Fleet, requests: int) -> AsyncIterator[asyncio.Event]:
    """Keep `requests` requests in progress at the decode instances until the event is set."""
    end = asyncio.Event()

    for one in fleet.decode:
        one.chat = after(end, decodes)
    async with asyncio.TaskGroup() as group:
        for _ in range(requests):
            before = sum(len(one.calls) for one in fleet.decode)
            group.create_task(fleet.chat(request(text())))
            await until(partial(more_than, before, fleet))
        yield end
        end.set()


def more_than(calls: int, fleet: Fleet) -> bool:
    return sum(len(one.calls) for one in fleet.decode) > calls


def counting(metrics: Metrics) -> tuple[Metrics, Callable[[], int]]:
    asked = 0

    async def counted() -> web.Response:
        nonlocal asked
        asked += 1
        return await metrics()

    return counted, lambda: asked


async def test_least_load_uses_reported_load(launch: Launch) -> None:
    async with launch(encode=1, decode=3, **OFTEN) as fleet:
        fleet.decode[0].metrics = reports((0, 9))
        fleet.decode[1].metrics = reports((4, 0), (5, 0))
        for one, waiting, running in ((0, 0, 9), (1, 9, 0)):
            await known(fleet, fleet.decode[one], waiting=waiting, running=running)

        assert await had(fleet, 6) == [0, 0, 6]
        rows = {row["url"]: row for row in (await listing(fleet))["instances"]}
        assert rows[fleet.d.url]["weight"] == 1.0
        async with fleet.http.get(f"{fleet.url}/metrics", headers=ADMIN) as reply:
            page = await reply.text()
        labels = f'instance="{fleet.d.url}",role="prefill_decode",state="running"'
        assert f"epd_instance_reported_requests{{{labels}}} 9" in page


async def drips() -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


class Endless(web.Response):
    """Response of a hundred megabytes, sent as fast as possible."""

    sent = 0

    async def _start(self, request: web.BaseRequest) -> Any:
        writer = await super()._start(request)
        Endless.sent = 0
        while Endless.sent < ENDLESS:
            await writer.write(b"x" * 65536)
            Endless.sent += 65536
        return writer


async def endless() -> web.Response:
    response = Endless()
    response.enable_chunked_encoding()
    return response


async def garbage() -> web.Response:
    return web.Response(body=b"\nvllm:num_requests_running{\xff\xfe" * 9999)


LIES = {
    "hangs": drips,
    "endless": endless,
    "garbage": garbage,
    "nan": reports((float("nan"), 1)),
}


@pytest.mark.fault(67)
@pytest.mark.parametrize("name", LIES)
async def test_a_hung_or_wrong_load_report_counts_as_no_report(launch: Launch, name: str) -> None:
    async with launch(decode=2, health_timeout_s=1, **OFTEN) as fleet:
        fleet.d.metrics, lied = counting(LIES[name])
        fleet.decode[1].metrics, asked = counting(reports((0, 0)))
        await until(lambda: lied() >= 2)
        before = asked()
        await until(lambda: asked() > before + 2)

        assert await had(fleet, 6) == [3, 3]
        assert (await reported(fleet))[fleet.d.url] is None
        assert fleet.events.changes == []
    assert Endless.sent < ENDLESS
    assert Endless.sent < 4 * MAX_PAGE_BYTES


async def test_no_load_is_requested_with_an_interval_of_0(launch: Launch) -> None:
    async with launch(decode=2, **OFTEN | {"load_interval_s": 0}) as fleet:
        fleet.d.metrics, asked = counting(reports((0, 50)))
        await asyncio.sleep(0.3)  # long enough for a dozen polls at the usual interval

        assert await had(fleet, 4) == [2, 2]
        assert asked() == 0


async def test_requests_of_a_session_go_the_same_way(launch: Launch) -> None:
    by_session: dict[str, Any] = dict.fromkeys(
        ("encode_balance", "prefill_balance", "decode_balance"), "session"
    )
    ways = Counter[tuple[str, ...]]()
    async with launch(encode=3, prefill=3, decode=3, **by_session) as fleet:
        for session in ("a", "b", "c", "d", "e", "f"):
            before = {one.url: len(one.calls) for one in fleet.instances}
            for seed in range(3):
                body = request(image(uuid=f"{session}{seed}"))
                assert (await fleet.chat(body, {"X-Session-Id": session}))[0] == 200
            way = tuple(one.url for one in fleet.instances if len(one.calls) > before[one.url])
            assert len(way) == 3  # one instance per stage
            ways[way] += 1
        assert len(ways) > 1
        told = {call.headers.get("x-session-id") for one in fleet.instances for call in one.calls}
        assert told == set("abcdef")  # vLLM knows the header too


async def test_the_header_of_sessions_has_another_name_where_it_is_set(launch: Launch) -> None:
    config: dict[str, Any] = {"decode_balance": "session", "session_header": "x-user-id"}
    async with launch(decode=3, **config) as fleet:
        assert sorted(await had(fleet, 6, {"X-User-Id": "a"})) == [0, 0, 6]
        assert sorted(await had(fleet, 6, {"X-Session-Id": "a"})) == [2, 2, 2]


async def test_configured_instances_get_requests_by_weight(launch: Launch) -> None:
    async with AsyncExitStack() as stack:
        ones = [await stack.enter_async_context(FakeInstance(decodes).running()) for _ in range(3)]
        weights = tuple(f"{one.url}={weight}" for one, weight in zip(ones, (3, 1, 0), strict=True))
        urls = tuple(one.url for one in ones)
        fleet = await stack.enter_async_context(
            launch(decode=0, decode_servers_urls=urls, instance_weights=weights)
        )
        for _ in range(8):
            assert (await fleet.chat(request(text())))[0] == 200

        assert [len(one.calls) for one in ones] == [6, 2, 0]


async def test_a_registered_instance_drained_by_weight_completes_its_requests(
    launch: Launch,
) -> None:
    async with (
        empty(launch, load_interval_s=0) as fleet,
        taking_part(fleet, Role.ENCODE),
        taking_part(fleet, Role.PREFILL_DECODE) as one,
        taking_part(fleet, Role.PREFILL_DECODE, weight=2.5) as other,
    ):
        fleet.decode[:] = [one, other]
        async with held(fleet, 3) as end:
            body = {"role": Role.PREFILL_DECODE, "url": other.url, "weight": 0}
            assert await register(fleet, body) == (200, {"registered": False})
            rows = {row["url"]: row for row in (await listing(fleet))["instances"]}
            assert rows[other.url]["weight"] == 0
            assert rows[other.url]["load"] == other.open == 2
            assert rows[other.url]["state"] == "healthy"
            end.set()
        one.chat = other.chat = decodes
        assert await had(fleet, 4) == [4, 0]

        status, said = await register(fleet, {**body, "weight": -1})
        assert (status, said["error"]["code"]) == (422, 422)
        assert "a weight is 0, or from" in said["error"]["message"]
