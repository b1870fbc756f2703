"""Several items of a request in one encode request (`--encode-group-items`)."""

import asyncio
from collections import Counter
from contextlib import suppress
from io import BytesIO
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from epd.aio import Flights
from tests.requests import Part, image, input_audio, request, text, video
from tests.support.backed import Backed, caching, items_of, parts_of
from tests.support.fake_instance import (
    FakeInstance,
    Handler,
    drops,
    encodes,
    encodes_without_params,
    hangs,
    refuses,
)
from tests.support.fleet import Fleet, Launch, until
from tests.support.strict_encode import Memory, Pushes

FOUR = [image(b"%d" % number) for number in range(4)]
ON: dict[str, Any] = {"encode_group_items": 8}
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def asked(*instances: FakeInstance) -> list[list[str]]:
    """Return the types of the parts of each encode request."""
    return [[part["type"] for part in call.parts] for one in instances for call in one.calls]


def uuids(fleet: Fleet) -> list[str]:
    """Return the names of all items in encode requests."""
    return [part["uuid"] for one in fleet.encode for call in one.calls for part in call.parts]


def sizes(fleet: Fleet) -> list[int]:
    """Return the number of items in each encode request."""
    return [len(call.parts) for one in fleet.encode for call in one.calls]


def where(fleet: Fleet) -> dict[str, int]:
    """Return the number of the encode instance that had each item."""
    return {
        part["uuid"]: number
        for number, one in enumerate(fleet.encode)
        for call in one.calls
        for part in call.parts
    }


def has(body: dict[str, Any], part: Part) -> bool:
    return any(one.get("image_url") == part["image_url"] for one in parts_of(body))


def of_groups(handler: Handler, then: Handler = encodes) -> Handler:
    """Return a handler that treats requests with several items differently."""

    async def chat(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (handler if len(parts_of(body)) > 1 else then)(http, body)

    return chat


def with_part(part: Part, handler: Handler, then: Handler = encodes) -> Handler:
    """Return a handler that treats requests with this picture differently."""

    async def chat(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (handler if has(body, part) else then)(http, body)

    return chat


def waits_for(event: asyncio.Event) -> Handler:
    async def chat(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await event.wait()
        return await encodes(http, body)

    return chat


def sized(width: int, height: int, shade: int = 0) -> Part:
    """Return a picture of this size, in pixels."""
    file = BytesIO()
    Image.new("RGB", (width, height), (shade, 0, 0)).save(file, "PNG")
    return image(file.getvalue())


async def test_the_pictures_of_a_request_are_one_encode_request(launch: Launch) -> None:
    async with launch(**ON) as fleet:
        assert await items_of(fleet, request(*FOUR, text())) == {"encoded": 4}

        assert asked(fleet.e) == [["image_url"] * 4]
        [call] = fleet.d.calls
        assert [part.get("uuid") for part in call.parts[:4]] == uuids(fleet)
        assert len(set(uuids(fleet))) == 4
        encoded = [event for event in fleet.events.stages if event.stage == "encode"]
        assert [event.modality for event in encoded] == ["image"] * 4


async def test_items_are_not_grouped_by_default(launch: Launch) -> None:
    async with launch() as fleet:
        await items_of(fleet, request(*FOUR))

        assert sizes(fleet) == [1] * 4


async def test_a_group_has_at_most_the_configured_number_of_items(launch: Launch) -> None:
    async with launch(encode_group_items=3) as fleet:
        await items_of(fleet, request(*FOUR))

        assert sorted(sizes(fleet)) == [1, 3]
        assert len(set(uuids(fleet))) == 4


async def test_encode_groups_have_one_modality_and_no_videos(
    launch: Launch,
) -> None:
    async with launch(**ON) as fleet:
        parts = [image(b"1"), input_audio(b"1"), video(b"1"), image(b"2"), input_audio(b"2")]
        await items_of(fleet, request(*parts, video(b"2")))

        assert sorted(asked(fleet.e)) == [
            ["image_url", "image_url"],
            ["input_audio", "input_audio"],
            ["video_url"],
            ["video_url"],
        ]


async def test_an_item_at_a_url_is_not_grouped(launch: Launch) -> None:
    async with launch(**ON) as fleet:
        await items_of(fleet, request(image("http://pictures.test/1.png"), *FOUR))

        assert sorted(sizes(fleet)) == [1, 4]


async def test_a_picture_twice_in_a_group_is_encoded_once(launch: Launch) -> None:
    async with launch(**ON) as fleet:
        parts = image(b"1"), image(b"2"), image(b"1")
        assert await items_of(fleet, request(*parts)) == {"encoded": 2, "hit": 1}

        assert sizes(fleet) == [2]
        first, second = uuids(fleet)
        assert [part["uuid"] for part in fleet.d.calls[0].parts] == [first, second, first]


async def test_pictures_of_a_group_with_processor_arguments_are_mapped_by_place(
    launch: Launch,
) -> None:
    async with launch(**ON, trust_request_mm_kwargs=True) as fleet:
        kwargs = {"mm_processor_kwargs": {"max_pixels": 9}}
        await items_of(fleet, request(*FOUR, **kwargs))
        await items_of(fleet, request(*FOUR[::-1], **kwargs))

        said = [[*call.body["ec_transfer_params"]] for call in fleet.d.calls]
        assert len(set(said[0])) == 4
        assert said[1] == said[0][::-1]
        assert sizes(fleet) == [4, 4]


async def test_items_of_a_group_are_sent_raw_if_the_instance_reports_no_metadata(
    launch: Launch,
) -> None:
    async with launch(**ON) as fleet:
        fleet.e.chat = encodes_without_params
        await items_of(fleet, request(*FOUR))

        assert [part["type"] for part in fleet.d.calls[0].parts] == ["image_url"] * 4


def broken(**said: Any) -> Handler:
    """Return a handler that reports entries which cannot be mapped to items."""

    async def chat(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [], "ec_transfer_params": said})

    return chat


SAME_PLACE = broken(a={"item_indices": [0]}, b={"item_indices": [0]})


FAULTS = [refuses(500), refuses(400), refuses(413), SAME_PLACE]


@pytest.mark.parametrize(
    ("encode", "fault"), [(1, drops), *((encode, fault) for encode in (1, 2) for fault in FAULTS)]
)
async def test_a_failed_group_is_repeated_item_by_item(
    launch: Launch, encode: int, fault: Handler
) -> None:
    async with launch(encode, **ON, on_encode_failure="fail") as fleet:
        for one in fleet.encode:
            one.chat = of_groups(fault)
        assert await items_of(fleet, request(*FOUR)) == {"encoded": 4}

        counts = Counter(sizes(fleet))
        assert counts[1] == 4
        assert sum(counts.values()) > 4
        assert fleet.events.changes == []


async def test_a_rejected_group_does_not_count_as_a_try_of_its_items(launch: Launch) -> None:
    """After its first death of an item, the only instance gets the item once more."""
    handlers = iter([refuses(500, ENGINE_DEAD)])

    async def dies_once(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await next(handlers, encodes)(http, body)

    async with launch(**ON, on_encode_failure="fail") as fleet:
        fleet.e.chat = of_groups(refuses(400), with_part(FOUR[0], dies_once))
        assert await items_of(fleet, request(*FOUR[:2])) == {"encoded": 2}

        assert sorted(sizes(fleet)) == [1, 1, 1, 2]


async def test_the_items_of_a_group_go_to_another_instance_if_theirs_is_busy(
    launch: Launch,
) -> None:
    async with launch(2, **ON, on_encode_failure="fail", encode_balance="least_load") as fleet:
        fleet.e.chat = refuses(503)
        assert await items_of(fleet, request(*FOUR)) == {"encoded": 4}

        assert sizes(fleet) == [2, 2, 1, 1]
        assert fleet.events.changes == []


async def test_an_invalid_item_of_a_group_fails_with_its_own_place(launch: Launch) -> None:
    bad = FOUR[2]
    async with launch(**ON) as fleet:
        fleet.e.chat = with_part(bad, refuses(400, "no picture"))
        async with fleet.post(request(text(), *FOUR)) as reply:
            error = (await reply.json())["error"]
            assert reply.status == 400
            assert reply.headers["x-epd-error"] == "encode_rejected"
            assert (error["message"], error["param"]) == ("no picture", "messages[0].content[3]")

        assert sizes(fleet)[0] == 4
        assert fleet.events.changes == []


async def test_only_the_failing_item_of_a_group_is_sent_raw(launch: Launch) -> None:
    async with launch(**ON) as fleet:
        fleet.e.chat = with_part(FOUR[0], refuses(500))
        async with fleet.post(request(*FOUR)) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-items"] == "hit=0,encoded=3,local=1"


@pytest.mark.fault(68)
async def test_only_the_fatal_item_of_a_group_is_blamed(launch: Launch) -> None:
    poison, *good = [image(b"%d" % number) for number in range(8)]
    config: Any = {"encode_balance": "least_load", "on_encode_failure": "fail"}
    killed = (503, "suspected_fatal")

    async with launch(encode=4, **ON, **config) as fleet:
        for one in fleet.encode:
            one.chat = with_part(poison, refuses(500, ENGINE_DEAD))

        async def outcome(*parts: Part) -> tuple[int, str | None]:
            async with fleet.post(request(*parts)) as reply:
                return reply.status, reply.headers.get("x-epd-error")

        def deadly() -> list[int]:
            """Return the number of items of each request with the fatal one."""
            calls = [call for one in fleet.encode for call in one.calls]
            return sorted(len(call.parts) for call in calls if has(call.body, poison))

        assert await outcome(poison, *good) == killed
        assert deadly() == [1, 2]
        # One death is not enough to reject it, but it shares no request any more.
        assert await outcome(text("again"), poison, *good) == killed
        # A second death of the instance that it has just killed is the same death.
        had = deadly()
        assert had in ([1, 1, 2], [1, 1, 1, 2])
        assert await outcome(text("and again"), poison) == killed
        assert deadly() == had
        assert await outcome(*good) == (200, None)


async def test_requests_with_a_picture_in_common_encode_each_picture_once(launch: Launch) -> None:
    a, b, c = FOUR[:3]
    async with launch(**ON) as fleet:
        release = asyncio.Event()
        fleet.e.chat = waits_for(release)
        first = asyncio.create_task(items_of(fleet, request(a, b)))
        await until(lambda: fleet.e.calls)
        second = asyncio.create_task(items_of(fleet, request(b, c)))
        await until(lambda: len(fleet.e.calls) == 2)
        release.set()

        assert await first == {"encoded": 2}
        assert await second == {"encoded": 1, "hit": 1}
        assert sizes(fleet) == [2, 1]
        assert len(set(uuids(fleet))) == 3


async def test_an_item_of_an_abandoned_request_reaches_another_that_waits_for_it(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, join = list[object](), Flights.try_join

    async def counted(flights: Flights[Any, Any], key: object, start: Any) -> Any:
        came.append(key)
        return await join(flights, key, start)

    monkeypatch.setattr(Flights, "try_join", counted)
    a, b = FOUR[:2]
    async with launch(**ON) as fleet:
        release = asyncio.Event()
        fleet.e.chat = waits_for(release)
        leaving = asyncio.create_task(fleet.chat(request(a, b)))
        await until(lambda: fleet.e.calls)
        waiting = asyncio.create_task(items_of(fleet, request(text(), b)))
        await until(lambda: len(came) == 3)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        await until(lambda: len(fleet.events.requests) == 1)
        release.set()

        assert await waiting == {"hit": 1}
        assert sizes(fleet) == [2]
        assert fleet.e.aborted == 0


async def test_an_abandoned_group_is_cancelled(launch: Launch) -> None:
    async with launch(**ON) as fleet:
        fleet.e.chat = hangs
        leaving = asyncio.create_task(fleet.chat(request(*FOUR)))
        await until(lambda: fleet.e.calls)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving

        await until(lambda: fleet.e.aborted == 1)
        assert sizes(fleet) == [4]


async def test_pictures_of_a_group_are_stored_once_each_and_found_again(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url, **ON) as fleet:
        assert await items_of(fleet, request(*FOUR)) == {"encoded": 4}
        await asyncio.gather(*backed.writes)
        assert await items_of(fleet, request(text(), *FOUR, image(b"new"))) == {
            "hit": 4,
            "encoded": 1,
        }

        assert sizes(fleet) == [4, 1]
        rows = [row.info for row in backed.store.ls() if row.info is not None]
        assert {info.key.identifier for info in rows} == set(uuids(fleet))


async def test_proxies_on_one_store_encode_the_pictures_of_their_groups_once(
    launch: Launch, backed: Backed, url: str
) -> None:
    a, b, c = FOUR[:3]
    backed.encode_s, backed.write_s = 0.3, 0.2
    async with (
        caching(launch, backed, url, **ON) as one,
        caching(launch, backed, url, **ON) as other,
    ):
        await asyncio.gather(
            *(items_of(one, request(a, b)) for _ in range(3)),
            *(items_of(other, request(b, c, a)) for _ in range(3)),
        )

        every = uuids(one) + uuids(other)
        assert sorted(every) == sorted(set(every))
        assert len(every) == 3


@pytest.mark.parametrize("group_items", [1, 8])
async def test_least_load_spreads_items_by_cost(launch: Launch, group_items: int) -> None:
    config: Any = {"encode_group_items": group_items, "encode_balance": "least_load"}
    async with launch(encode=2, **config) as fleet:
        small = [sized(112, 112, shade) for shade in range(5)]
        parts = [*small[:2], sized(1120, 1120), *small[2:]]
        await items_of(fleet, request(*parts))

        large = [
            len(call.parts)
            for one in fleet.encode
            for call in one.calls
            if has(call.body, parts[2])
        ]
        assert large == [1]
        by_instance = sorted(sum(len(call.parts) for call in one.calls) for one in fleet.encode)
        assert by_instance == [1, 5]


async def test_equal_instances_take_turns_with_the_largest_item(launch: Launch) -> None:
    async with launch(encode=3, encode_balance="least_load") as fleet:
        for shade in range(6):
            await items_of(fleet, request(sized(560, 560, shade), sized(112, 112, shade)))

        large = [Counter(len(str(call.body)) > 2000 for call in one.calls) for one in fleet.encode]
        assert [count.total() for count in large] == [4, 4, 4]


@pytest.mark.parametrize("balance", ["affinity", "round_robin"])
async def test_items_in_groups_have_the_same_instances_as_single_items(
    launch: Launch, balance: str
) -> None:
    config: Any = {"encode_balance": balance}
    async with launch(encode=3, **config) as alone:
        shared: Any = {"encode_servers_urls": tuple(one.url for one in alone.encode)}
        body = request(*(image(b"%d" % number) for number in range(9)))
        await items_of(alone, body)
        expected = where(alone)
        for one in alone.encode:
            one.calls.clear()
        async with launch(**config, **ON, **shared) as grouped:
            assert await items_of(grouped, body) == {"encoded": 9}

        assert where(alone) == expected
        assert len(expected) == 9
        assert len(sizes(alone)) <= 3


async def test_a_group_of_pushed_items_has_the_transfer_id_of_each(launch: Launch) -> None:
    pushes = Pushes()
    config: Any = {"ec_consumer_zmq_addrs": ("tcp://d0:1",), "ec_consumer_dp_size": 1}
    async with launch(**ON, **config) as fleet:
        fleet.e.chat = pushes.encodes
        fleet.d.chat = pushes.consumes("tcp://d0:1")
        await items_of(fleet, request(image(b"1"), input_audio(), image(b"2"), image(b"1")))

        assert sorted(sizes(fleet)) == [1, 3]
        assert len(pushes.pushed) == 4
    assert pushes.wrong == []
    assert pushes.waiting == {}


async def test_a_group_of_outputs_in_memory_is_read_from_its_instance(launch: Launch) -> None:
    memory = Memory()
    async with launch(ec_transfer="nixl", **ON) as fleet:
        fleet.e.chat = memory.encodes(5601)
        fleet.d.chat = memory.consumes()
        await items_of(fleet, request(*FOUR))

        assert sizes(fleet) == [4]
        assert memory.read == uuids(fleet)
    assert memory.wrong == []
