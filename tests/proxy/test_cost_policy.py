"""Policy `cost` in front of fake instances: which items they get, and what is counted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from epd.observe.request_log import LogObserver
from epd.request.item_tokens import PIXELS_PER_TOKEN
from epd.routing.instances import Instance, Role
from epd.server.app_keys import CONFIG, TABLE
from tests.requests import image, png, request, text, video
from tests.support.backed import BUDGET_S, Both, Page, encoded, items_of
from tests.support.fake_instance import after
from tests.support.fleet import Fleet, Launch, until

SMALL, LARGE = image(png(100, 100)), image(png(1000, 1000))
STATIC: dict[str, Any] = {"encode_below_pixels": 20_000}


@asynccontextmanager
async def running(
    launch: Launch, both: Both, url: str, *, writes: bool = True, prefill: int = 0, **config: Any
) -> AsyncIterator[Fleet]:
    defaults: dict[str, Any] = {"ec_store": url, "ec_store_budget_s": BUDGET_S}
    async with launch(prefill=prefill, load_interval_s=0.05, **defaults | config) as fleet:
        for one in fleet.encode:
            one.chat = both.encodes
        pages = []
        for one in fleet.prefill or fleet.decode:
            one.metrics = page = Page(writes=writes)
            pages.append(page)
        if not prefill:
            for one in fleet.decode:
                one.chat = both.decodes
        await until(lambda: all(one.asked > 1 for one in pages))
        yield fleet
        await asyncio.gather(*both.writes)


async def page_of(fleet: Fleet) -> dict[str, float]:
    async with fleet.http.get(f"{fleet.url}/metrics") as reply:
        families = text_string_to_metric_families(await reply.text())
    return {
        ",".join([one.name, *(one.labels[name] for name in ("decision", "reason"))])
        if "decision" in one.labels
        else one.name: one.value
        for family in families
        for one in family.samples
    }


async def decisions(fleet: Fleet) -> dict[str, float]:
    page = await page_of(fleet)
    prefix = "epd_encode_decisions_total,"
    return {name.removeprefix(prefix): it for name, it in page.items() if name.startswith(prefix)}


async def test_small_picture_is_encoded_locally_and_found_by_the_next_request(
    launch: Launch, both: Both, url: str
) -> None:
    async with running(launch, both, url, **STATIC) as fleet:
        first = await items_of(fleet, request(text(), SMALL))
        second = await items_of(fleet, request(text(), SMALL))

        assert (first, second) == ({"local": 1}, {"hit": 1})
        assert [[part["type"] for part in call.parts] for call in fleet.d.calls] == [
            ["text", "image_url"],
            ["text", "image_embeds"],
        ]
        assert encoded(fleet) == 0
        assert await decisions(fleet) == {"local,below_pixels": 1}


async def test_large_picture_and_other_media_are_encoded(
    launch: Launch, both: Both, url: str
) -> None:
    async with running(launch, both, url, **STATIC) as fleet:
        found = await items_of(fleet, request(SMALL, LARGE, video()))

        assert found == {"encoded": 2, "local": 1}
        assert await decisions(fleet) == {
            "local,below_pixels": 1,
            "encode,above_pixels": 1,
            "encode,unknown_size": 1,
        }


async def test_prefill_gets_the_items_that_stay(launch: Launch, both: Both, url: str) -> None:
    async with running(launch, both, url, prefill=1, **STATIC) as fleet:
        await items_of(fleet, request(SMALL))

        assert [part["type"] for part in fleet.p.calls[0].parts] == ["image_url"]
        assert encoded(fleet) == 0


async def test_items_are_encoded_if_their_consumers_write_no_outputs(
    launch: Launch, both: Both, url: str
) -> None:
    async with running(launch, both, url, writes=False, **STATIC) as fleet:
        assert await items_of(fleet, request(SMALL)) == {"encoded": 1}
        assert await decisions(fleet) == {"encode,unsaved": 1}


async def test_item_beside_one_without_media_is_encoded(
    launch: Launch, both: Both, url: str
) -> None:
    async with running(launch, both, url, **STATIC) as fleet:
        await items_of(fleet, request({**LARGE, "uuid": "mine"}))
        await asyncio.gather(*both.writes)
        known = {"type": "image_url", "image_url": None, "uuid": "mine"}

        assert await items_of(fleet, request(known, SMALL)) == {"hit": 1, "encoded": 1}
        assert await decisions(fleet) == {"encode,above_pixels": 1, "encode,required": 1}


async def test_item_beside_a_stored_one_is_encoded(launch: Launch, both: Both, url: str) -> None:
    async with running(launch, both, url, **STATIC) as fleet:
        await items_of(fleet, request(LARGE))
        await asyncio.gather(*both.writes)

        assert await items_of(fleet, request(LARGE, SMALL)) == {"hit": 1, "encoded": 1}
        assert await decisions(fleet) == {"encode,above_pixels": 1, "encode,beside_stored": 1}


async def test_cost_is_compared_once_an_encode_instance_is_measured(
    launch: Launch, both: Both, url: str
) -> None:
    async with running(launch, both, url, policies=("cost",)) as fleet:
        pictures = [image(png(100 + size, 100)) for size in range(4)]
        found = [await items_of(fleet, request(one)) for one in pictures]

        assert found == [{"encoded": 1}, {"encoded": 1}, {"local": 1}, {"local": 1}]
        assert await decisions(fleet) == {"encode,unmeasured": 2, "local,cheaper": 2}


async def test_tokens_of_a_picture_are_predicted_by_its_pixels(launch: Launch) -> None:
    free = asyncio.Event()
    async with launch() as fleet:
        fleet.e.chat = after(free, fleet.e.chat)
        load = fleet.runner.app[TABLE].load(Instance(Role.ENCODE, fleet.e.url))
        waiting = asyncio.create_task(items_of(fleet, request(image(png(180, 540)))))
        await until(lambda: fleet.e.open)

        assert load.encode.tokens == round(180 * 540 / PIXELS_PER_TOKEN)
        free.set()
        await waiting


async def test_item_being_encoded_is_waited_for(launch: Launch, both: Both, url: str) -> None:
    free = asyncio.Event()
    async with running(launch, both, url, policies=("cost",)) as fleet:
        fleet.e.chat = after(free, both.encodes)
        both_requests = [asyncio.create_task(items_of(fleet, request(SMALL))) for _ in range(2)]
        await until(lambda: [one.stage for one in fleet.events.stages].count("store") == 2)
        await until(lambda: fleet.e.open)
        free.set()

        found = await asyncio.gather(*both_requests)
        assert sorted(map(str, found)) == ["{'encoded': 1}", "{'hit': 1}"]
        assert encoded(fleet) == 1


async def test_item_beside_one_being_encoded_is_placed_by_the_policy(
    launch: Launch, both: Both, url: str
) -> None:
    free = asyncio.Event()
    async with running(launch, both, url, **STATIC) as fleet:
        fleet.e.chat = after(free, both.encodes)
        first = asyncio.create_task(items_of(fleet, request(LARGE)))
        await until(lambda: fleet.e.open)
        second = asyncio.create_task(items_of(fleet, request(LARGE, SMALL)))
        await until(lambda: [one.stage for one in fleet.events.stages].count("store") == 2)
        free.set()

        assert await first == {"encoded": 1}
        assert await second == {"hit": 1, "local": 1}
        assert await decisions(fleet) == {
            "encode,above_pixels": 1,
            "encode,under_way": 1,
            "local,below_pixels": 1,
        }


async def test_reason_is_on_the_log_line(launch: Launch, both: Both, url: str) -> None:
    async with running(launch, both, url, **STATIC) as fleet:
        await items_of(fleet, request(SMALL, LARGE, image(png(999, 999))))
        live = fleet.runner.app[CONFIG]
        with capture_logs() as lines:
            LogObserver(live).request_done(fleet.events.requests[0])

    assert lines[0]["encode_decisions"] == "local:below_pixels=1,encode:above_pixels=2"
    assert lines[0]["policy"] == "cost"


async def test_text_runs_through_the_same_policy(launch: Launch, both: Both, url: str) -> None:
    async with running(launch, both, url, **STATIC) as fleet:
        status, _ = await fleet.chat(request(text()))

        assert (status, fleet.events.requests[-1].policy) == (200, "cost")
        assert await decisions(fleet) == {}


async def test_backlogs_are_those_of_requests_under_way(launch: Launch) -> None:
    free = asyncio.Event()

    async with launch() as fleet:
        idle = await page_of(fleet)
        for one in fleet.instances:
            one.chat = after(free, one.chat)
        prompt = request(text("x" * 4000))
        asked = [
            asyncio.create_task(fleet.chat(one))
            for one in (request(image(png(2800, 2800))), prompt)
        ]
        await until(lambda: all(one.open for one in fleet.instances))
        busy = await page_of(fleet)
        free.set()
        await asyncio.gather(*asked)
        ended = await page_of(fleet)

    encode, prefill = "epd_encode_backlog_seconds", "epd_prefill_backlog_tokens"
    assert (idle[encode], idle[prefill]) == (0, 0)
    assert busy[encode] == pytest.approx(1.0)  # 10,000 tokens at the assumed speed
    assert 1000 <= busy[prefill] < 1100
    assert (ended[encode], ended[prefill]) == (0, 0)


async def test_fleet_without_encode_instances_has_no_backlog_of_them(launch: Launch) -> None:
    async with launch(encode=0) as fleet:
        page = await page_of(fleet)

    assert "epd_encode_backlog_seconds" not in page
    assert page["epd_prefill_backlog_tokens"] == 0
