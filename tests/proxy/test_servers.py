"""Servers that encode, prefill and decode (`--servers-urls`), which write to the store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.requests import image, png, request, text
from tests.support.backed import BUDGET_S, Both, Page, items_of, limit_claims, media_types, parts_of
from tests.support.fake_instance import STREAM, after, decodes, fails_first, refuses
from tests.support.fleet import Fleet, Launch, until

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."

FIRST, SECOND, THIRD = (image(png(100, side)) for side in (101, 102, 103))


@asynccontextmanager
async def serving(
    launch: Launch, both: Both, url: str, servers: int = 2, *, writes: bool = True, **config: Any
) -> AsyncIterator[Fleet]:
    defaults: dict[str, Any] = {"ec_store": url, "ec_store_budget_s": BUDGET_S}
    async with launch(servers=servers, load_interval_s=0.05, **defaults | config) as fleet:
        pages = []
        for one in fleet.decode:
            one.chat = both.decodes
            one.metrics = page = Page(writes=writes)
            pages.append(page)
        await until(lambda: all(one.asked > 1 for one in pages))
        yield fleet
        await asyncio.gather(*both.writes)


def sent(fleet: Fleet) -> list[list[str]]:
    """Return the media types of the parts of each request, of all servers."""
    return [kinds for server in fleet.decode for kinds in media_types(server)]


async def until_looked_up(fleet: Fleet, number: int) -> None:
    """Wait until this many requests have looked up their items."""
    stages = fleet.events.stages
    await until(lambda: [done.stage for done in stages].count("store") == number)


async def test_a_new_picture_goes_along_and_a_known_one_does_not(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url) as fleet:
        new = await items_of(fleet, request(text(), FIRST))
        known = await items_of(fleet, request(text(), FIRST))

        assert (new, known) == ({"local": 1}, {"hit": 1})
        assert sorted(sent(fleet)) == [["text", "image_embeds"], ["text", "image_url"]]


async def test_a_new_picture_beside_known_ones_takes_all_of_them_along(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url, servers=1) as fleet:
        await items_of(fleet, request(FIRST, SECOND))
        items = await items_of(fleet, request(FIRST, SECOND, THIRD))

        assert items == {"hit": 2, "local": 1}
        assert sent(fleet)[1] == ["image_url"] * 3
        uuids = [part["uuid"] for part in fleet.d.calls[1].parts]
        assert uuids[:2] == [part["uuid"] for part in fleet.d.calls[0].parts]


class Gate:
    """Handler in which requests with pictures wait for an event before the server encodes."""

    def __init__(self, both: Both) -> None:
        self.free = asyncio.Event()
        self._both = both

    async def __call__(self, asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if any("image_url" in part for part in parts_of(body)):
            await self.free.wait()
        return await self._both.decodes(asked, body)


def closed_gate(both: Both, fleet: Fleet) -> Gate:
    """Put a gate before all servers."""
    gate = Gate(both)
    for server in fleet.decode:
        server.chat = gate
    return gate


async def test_requests_with_each_others_new_pictures_do_not_wait_for_each_other(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url) as fleet:
        gate = closed_gate(both, fleet)
        bodies = (FIRST, SECOND), (SECOND, FIRST), (SECOND, THIRD)
        asked = []
        for number, body in enumerate(bodies, start=1):
            asked.append(asyncio.create_task(items_of(fleet, request(*body))))
            await until_looked_up(fleet, number)
        await until(lambda: len(sent(fleet)) == 2)
        gate.free.set()

        assert [await one for one in asked] == [{"local": 2}, {"hit": 2}, {"local": 2}]


async def test_a_picture_that_one_request_has_twice_does_not_wait_for_itself(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url) as fleet:
        assert await items_of(fleet, request(FIRST, FIRST)) == {"local": 2}


async def test_a_claim_ends_at_the_first_token_of_a_stream(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url, servers=1) as fleet:
        more = asyncio.Event()

        async def stream(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(asked)
            await response.write(STREAM[0])
            await more.wait()
            for event in STREAM[1:]:
                await response.write(event)
            return response

        fleet.d.chat = stream  # and the entry is never written
        async with fleet.post(request(FIRST) | {"stream": True}) as reply:
            await reply.content.readany()
            fleet.d.chat = both.decodes
            # The claim is kept for a second, in which the entry may be written.
            async with asyncio.timeout(20):  # with the claim, it would be half a minute
                assert await items_of(fleet, request(FIRST)) == {"local": 1}
            more.set()
            await reply.read()


async def test_servers_that_do_not_write_are_not_waited_for(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url, writes=False) as fleet:
        gate = closed_gate(both, fleet)
        asked = [asyncio.create_task(items_of(fleet, request(FIRST))) for _ in range(2)]
        await until(lambda: len(sent(fleet)) == 2)
        gate.free.set()

        assert await asyncio.gather(*asked) == [{"local": 1}] * 2


async def test_a_new_picture_beside_one_without_media_gets_an_encode_request(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url, servers=1) as fleet:
        await items_of(fleet, request(FIRST | {"uuid": "a"}))
        fleet.d.chat = both.serves
        items = await items_of(
            fleet, request({"type": "image_url", "image_url": None, "uuid": "a"}, SECOND)
        )

        assert items == {"hit": 1, "encoded": 1}
        assert sent(fleet)[1:] == [["image_url"], ["image_embeds"] * 2]


async def test_media_pushed_beforehand_are_encoded_by_a_server(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url, servers=1) as fleet:
        fleet.d.chat = both.serves
        body = {"model": "m", "content": [FIRST]}
        async with fleet.http.post(f"{fleet.url}/v1/media", json=body) as reply:
            assert reply.status == 200, await reply.text()

        assert await items_of(fleet, request(FIRST)) == {"hit": 1}


async def test_pictures_return_to_their_server(launch: Launch, both: Both, url: str) -> None:
    async with serving(launch, both, url, servers=2) as fleet:
        for _ in range(3):
            for picture in (FIRST, SECOND):
                await items_of(fleet, request(picture))

        assert [len(server.calls) for server in fleet.decode] == [3, 3]
        assert [
            len({part["uuid"] for call in server.calls for part in call.parts})
            for server in fleet.decode
        ] == [1, 1]


async def test_a_picture_is_encoded_again_if_its_entry_is_lost(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url) as fleet:
        await items_of(fleet, request(FIRST))
        await both.corrupt()

        assert await items_of(fleet, request(FIRST)) == {"local": 1}
        assert sent(fleet).count(["image_url"]) == 2


async def test_servers_encode_after_the_failure_of_another(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url) as fleet:
        handler = fails_first(1, refuses(503), both.decodes)
        for server in fleet.decode:
            server.chat = handler

        assert await items_of(fleet, request(FIRST)) == {"local": 1}
        assert await items_of(fleet, request(FIRST)) == {"hit": 1}


async def test_requests_at_two_proxies_for_one_new_picture_make_one_encode(
    launch: Launch, both: Both, url: str
) -> None:
    """Requests of one proxy that look the picture up at the same time wait too."""
    async with (
        serving(launch, both, url, servers=1) as first,
        serving(launch, both, url, servers=1) as second,
    ):
        gate = Gate(both)
        for fleet in (first, second):
            fleet.d.chat = gate
        asked = [
            asyncio.create_task(items_of(fleet, request(FIRST))) for fleet in (first, second) * 3
        ]
        await until(lambda: sent(first) + sent(second))
        await asyncio.sleep(0.2)
        gate.free.set()
        items = await asyncio.gather(*asked)

        assert sorted(map(str, items)) == ["{'hit': 1}"] * 5 + ["{'local': 1}"]


async def test_one_of_the_waiting_requests_takes_over_after_a_failure(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url) as fleet:
        gate = closed_gate(both, fleet)
        first = asyncio.create_task(fleet.chat(request(FIRST)))
        await until(lambda: sent(fleet))
        asked = [asyncio.create_task(items_of(fleet, request(FIRST))) for _ in range(12)]
        await asyncio.sleep(0.2)
        first.cancel()
        await until(lambda: len(sent(fleet)) == 2)
        await asyncio.sleep(0.2)
        gate.free.set()
        items = await asyncio.gather(*asked)

        assert sorted(map(str, items)) == ["{'hit': 1}"] * 11 + ["{'local': 1}"]


async def test_no_request_waits_for_an_entry_that_did_not_appear(
    launch: Launch, both: Both, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_claims(monkeypatch, consumer_wait_s=0.2, written_within_s=0.0)
    async with serving(launch, both, url) as fleet:
        for server in fleet.decode:
            server.chat = decodes  # which writes nothing
        assert await items_of(fleet, request(FIRST)) == {"local": 1}
        gate = closed_gate(both, fleet)
        asked = [asyncio.create_task(items_of(fleet, request(FIRST))) for _ in range(4)]
        await until(lambda: len(sent(fleet)) == 5)
        gate.free.set()

        assert await asyncio.gather(*asked) == [{"local": 1}] * 4


async def test_requests_wait_for_a_server_that_hangs_once_and_not_for_long(
    launch: Launch, both: Both, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = limit_claims(monkeypatch, consumer_wait_s=0.3)
    async with serving(launch, both, url) as fleet:
        gate = closed_gate(both, fleet)
        hung = asyncio.create_task(items_of(fleet, request(FIRST)))
        await until(lambda: sent(fleet))
        asked = [asyncio.create_task(items_of(fleet, request(FIRST))) for _ in range(3)]
        await until(lambda: len(sent(fleet)) == 4)
        made[0].consumer_wait_s = 3600
        late = asyncio.create_task(items_of(fleet, request(FIRST)))
        await until(lambda: len(sent(fleet)) == 5)
        gate.free.set()

        assert await asyncio.gather(hung, *asked, late) == [{"local": 1}] * 5


async def test_servers_that_have_told_nothing_do_not_end_the_sharing_of_encodes(
    launch: Launch, both: Both, url: str
) -> None:
    async with launch(
        servers=2, ec_store=url, ec_store_budget_s=BUDGET_S, load_interval_s=0.05
    ) as fleet:
        gate = closed_gate(both, fleet)
        fleet.d.metrics = page = Page()  # the other one has no metrics
        await until(lambda: page.asked > 1)
        asked = [asyncio.create_task(items_of(fleet, request(FIRST))) for _ in range(3)]
        await until(lambda: sent(fleet))
        await asyncio.sleep(0.2)
        gate.free.set()

        assert sorted(map(str, await asyncio.gather(*asked))) == [
            "{'hit': 1}",
            "{'hit': 1}",
            "{'local': 1}",
        ]


async def test_sessions_stay_at_their_server(launch: Launch, both: Both, url: str) -> None:
    async with serving(launch, both, url, decode_balance="session") as fleet:
        for number in range(40):  # by chance, all of few are at one server
            before = [len(server.calls) for server in fleet.decode]
            for _ in range(2):
                async with fleet.post(request(FIRST), {"x-session-id": str(number)}) as reply:
                    assert reply.status == 200
            counts = zip(fleet.decode, before, strict=True)
            assert {len(server.calls) - count for server, count in counts} == {0, 2}

        assert all(server.calls for server in fleet.decode)


@pytest.mark.fault(68)
async def test_requests_that_wait_for_a_picture_end_no_further_server(
    launch: Launch, both: Both, url: str
) -> None:
    async with serving(launch, both, url, servers=4) as fleet:
        free = asyncio.Event()
        for server in fleet.decode:
            server.chat = after(free, refuses(500, ENGINE_DEAD))
        asked = [
            asyncio.create_task(fleet.chat(request(FIRST, text(str(number)))))
            for number in range(4)
        ]
        await until_looked_up(fleet, 4)
        free.set()
        answers = await asyncio.gather(*asked)

        assert [status for status, _ in answers] == [503] * 4
        assert len(sent(fleet)) == 2
