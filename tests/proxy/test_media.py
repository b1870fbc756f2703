"""Media with client-chosen names: upload, use by name, deletion, separation of tenants."""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ec_store import StoreUnavailable
from ec_store.disk.store import SharedDiskStore
from epd.request.warmup import Warmup
from epd.server import app as proxy_app
from tests.requests import Part, image, input_audio, request, text, video
from tests.support.backed import (
    Backed,
    caching,
    encoded,
    items_of,
    media_types,
)
from tests.support.clients import ALICE, ALICE_2, BOB, bearer
from tests.support.fake_instance import refuses
from tests.support.fleet import Fleet, Launch


def named(uuid: str, kind: str = "image_url") -> Part:
    """Return a content part with a name and without media."""
    return {"type": kind, kind: None, "uuid": uuid}


async def push(
    fleet: Fleet, *parts: Part | str, key: str | None = None, **more: Any
) -> tuple[int, dict[str, Any]]:
    asked = {"model": "m", "content": list(parts), **more}
    headers = bearer(key) if key else None
    async with fleet.http.post(f"{fleet.url}/v1/media", json=asked, headers=headers) as reply:
        return reply.status, await reply.json()


async def forget(fleet: Fleet, uuid: str, key: str | None = None) -> tuple[int, dict[str, Any]]:
    headers = bearer(key) if key else None
    target = f"{fleet.url}/v1/media/{uuid}"
    async with fleet.http.delete(target, params={"model": "m"}, headers=headers) as reply:
        return reply.status, await reply.json()


def has_no_room(*_: object, **__: object) -> bool:
    raise StoreUnavailable("full")


async def settled(backed: Backed) -> None:
    """Wait until entries and names are written."""
    await asyncio.gather(*backed.writes)
    await asyncio.sleep(0.2)


async def test_media_may_be_uploaded_first_and_then_named(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        status, answer = await push(fleet, image(b"cat", uuid="cat"), input_audio(b"purr"))
        assert status == 200
        cat, purr = answer["data"]
        assert (cat["uuid"], cat["modality"], cat["result"]) == ("cat", "image", "encoded")
        assert (purr["uuid"], purr["modality"]) == (purr["key"], "audio")
        assert cat["tokens"] == 1
        assert cat["bytes"] > 16

        body = request(named("cat"), text(), named(purr["uuid"], "input_audio"))
        assert await items_of(fleet, body) == {"hit": 2}
        assert encoded(fleet) == 2
        assert media_types(fleet.d) == [["image_embeds", "text", "audio_embeds"]]
        assert fleet.d.calls[0].parts[0]["uuid"] == cat["key"] != "cat"
        assert (await push(fleet, image(b"cat", uuid="cat")))[1]["data"][0]["result"] == "hit"


async def test_a_name_given_in_a_conversation_is_known_from_then_on(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as one, caching(launch, backed, url) as other:
        await items_of(one, request(image(b"cat", uuid="cat")))
        await settled(backed)

        for fleet in (one, other):
            assert await items_of(fleet, request(named("cat"))) == {"hit": 1}


async def test_a_name_refers_to_the_latest_media(launch: Launch, backed: Backed, url: str) -> None:
    async with caching(launch, backed, url) as fleet:
        for content in (b"1", b"2"):
            await items_of(fleet, request(image(content, uuid="cat")))
            await settled(backed)
        await items_of(fleet, request(named("cat")))

        first, second, by_name = (call.parts[0]["uuid"] for call in fleet.d.calls)
        assert first != second == by_name


@pytest.mark.parametrize("part", [named("never"), {"type": "image_url", "uuid": "never"}])
async def test_an_unknown_name_is_a_404(
    launch: Launch, backed: Backed, url: str, part: Part
) -> None:
    async with caching(launch, backed, url) as fleet:
        status, reply = await fleet.chat(request(text(), part))

        assert status == 404
        assert reply["error"]["type"] == "NotFoundError"
        assert reply["error"]["param"] == "messages[0].content[1]"
        assert fleet.d.calls == []


async def test_names_of_media_are_unknown_without_a_store(launch: Launch) -> None:
    async with launch() as fleet:
        await fleet.chat(request(image(b"cat", uuid="cat")))
        assert (await fleet.chat(request(named("cat"))))[0] == 404
        assert (await push(fleet, image(b"cat")))[0] == 503
        assert (await forget(fleet, "cat"))[0] == 503


async def test_a_media_name_without_its_entry_is_a_404(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        await push(fleet, image(b"cat", uuid="cat"))
        await backed.forget()

        assert (await fleet.chat(request(named("cat"))))[0] == 404
        assert (await fleet.chat(request(image(b"dog"), named("cat"))))[0] == 404
        assert encoded(fleet) == 1, "the dog was encoded for a request that must fail"
        assert fleet.d.calls == []


async def test_a_lost_entry_of_a_name_is_a_404_and_not_a_500(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        await push(fleet, image(b"cat", uuid="cat"))

        async def loses(request: Any, body: dict[str, Any]) -> Any:
            await backed.forget()
            return await refuses(500, "Internal server error")(request, body)

        fleet.d.chat = loses
        assert (await fleet.chat(request(named("cat"))))[0] == 404


async def test_raw_and_named_items_of_a_request(launch: Launch, backed: Backed, url: str) -> None:
    """In vLLM, items must not be mixed: if one has a name only, all of its modality go by name."""
    async with caching(launch, backed, url, decode_media="raw") as fleet:
        await push(fleet, image(b"cat", uuid="cat"))
        await items_of(fleet, request(named("cat"), image(b"dog")))

        assert media_types(fleet.d) == [["image_embeds", "image_embeds"]]


async def test_a_video_by_name_is_a_404(launch: Launch, backed: Backed, url: str) -> None:
    """The metadata of a video are not enough for a consumer."""
    async with caching(launch, backed, url) as fleet:
        await push(fleet, {**video(), "uuid": "film"})
        status, reply = await fleet.chat(request(named("film", "video_url")))

        assert (status, reply["error"]["param"]) == (404, "messages[0].content[0]")


@pytest.mark.fault(75)
async def test_a_picture_by_name_beside_a_video_is_sent_as_metadata(
    launch: Launch, backed: Backed, url: str
) -> None:
    """A video is forwarded raw. So the only option is a mixture, which some models accept."""
    async with caching(launch, backed, url) as fleet:
        await push(fleet, image(b"cat", uuid="cat"))
        status, _ = await fleet.chat(request(video(), named("cat")))

        assert status == 200
        assert [part["type"] for part in fleet.d.calls[0].parts] == ["video_url", "image_embeds"]


async def test_forgotten_media_are_not_known_any_more(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        await push(fleet, image(b"cat", uuid="cat"))
        assert await forget(fleet, "cat") == (
            200,
            {"id": "cat", "object": "media.deleted", "deleted": True},
        )

        assert (await forget(fleet, "cat"))[0] == 404
        assert (await fleet.chat(request(named("cat"))))[0] == 404
        assert await items_of(fleet, request(image(b"cat"))) == {"encoded": 1}


@pytest.mark.fault(52)
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ([], None),
        ({"model": "m"}, "content"),
        ({"content": []}, "content"),
        ({"content": ["cat"]}, "content[0]"),
        ({"content": [text()]}, "content[0]"),
        ({"content": [image(b"1"), {"type": ["image_url"]}]}, "content[1]"),
        ({"content": [{"type": {"image_url": 1}}]}, "content[0]"),
        ({"content": [image(b"1"), named("never")]}, "content[1]"),
        ({"content": [{"type": "image_url"}]}, "content[0].image_url"),
        ({"content": [image(b"1")], "max_tokens": 3}, "max_tokens"),
        ({"content": [image(b"1")], "x" * 1000: 3}, "x" * 64),
        # A string in the place of media that are cut out before parsing.
        ({"content": [image(b"1")], "data:;base64," + "x" * 40_000: 3}, "data:;base64," + "x" * 51),
        ({"content": [image(b"1"), image(b"BM")]}, "content[1]"),
        ({"content": [image(b"1")] * 65}, "messages"),
    ],
)
async def test_invalid_media_get_a_4xx_that_names_the_field(
    launch: Launch, backed: Backed, url: str, asked: Any, param: str | None
) -> None:
    async with (
        caching(launch, backed, url) as fleet,
        fleet.http.post(f"{fleet.url}/v1/media", json=asked) as reply,
    ):
        assert reply.status in {400, 404}
        assert (await reply.json())["error"]["param"] == param


async def test_an_item_that_cannot_be_encoded_is_the_engines_error(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        fleet.e.chat = refuses(400, "no picture")
        status, reply = await push(fleet, image(b"cat"))

        assert (status, reply["error"]["message"]) == (400, "no picture")
        assert reply["error"]["param"] == "content[0]"


async def test_an_unstored_output_is_a_503(
    launch: Launch, backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_app, "Warmup", partial(Warmup, _stored_within_s=0.1))
    backed.write_s = 1.0
    async with caching(launch, backed, url) as fleet:
        assert (await push(fleet, image(b"cat")))[0] == 503


async def test_a_media_name_is_dropped_if_its_new_picture_cannot_be_encoded(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        await items_of(fleet, request(image(b"1", uuid="cat")))
        fleet.e.chat = refuses(503)
        assert await items_of(fleet, request(image(b"2", uuid="cat"))) == {"local": 1}

        assert (await fleet.chat(request(named("cat"))))[0] == 404


async def test_a_media_name_is_dropped_if_its_new_picture_skips_the_encode(
    launch: Launch, backed: Backed, url: str
) -> None:
    policies = ("prefill_decode",)
    async with (
        caching(launch, backed, url) as one,
        caching(launch, backed, url, prefill=1, policies=policies) as other,
    ):
        await push(one, image(b"cat", uuid="pet"))
        assert (await other.chat(request(image(b"cat", uuid="pet"))))[0] == 200
        assert (await one.chat(request(named("pet"))))[0] == 200, "the picture is the same"
        assert (await other.chat(request(image(b"dog", uuid="pet"))))[0] == 200

        assert encoded(other) == 0
        assert (await one.chat(request(named("pet"))))[0] == 404


async def test_a_media_name_is_dropped_if_it_cannot_be_rewritten(
    launch: Launch, backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with caching(launch, backed, url) as fleet:
        for content in (b"1", b"2"):
            await items_of(fleet, request(image(content)))
            await asyncio.gather(*backed.writes)
        await items_of(fleet, request(image(b"1", uuid="cat")))
        with monkeypatch.context() as full:
            full.setattr(SharedDiskStore, "put", has_no_room)
            await items_of(fleet, request(image(b"2", uuid="cat")))
            assert (await fleet.chat(request(named("cat"))))[0] == 404
        await items_of(fleet, request(image(b"2", uuid="cat")))

        assert await items_of(fleet, request(named("cat"))) == {"hit": 1}
        assert fleet.d.calls[-1].parts[0]["uuid"] == fleet.d.calls[1].parts[0]["uuid"]


async def test_a_name_forgotten_by_one_proxy_is_found_through_another(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as one, caching(launch, backed, url) as other:
        await push(one, image(b"cat", uuid="cat"))
        assert (await forget(one, "cat"))[0] == 200
        await push(other, image(b"cat", uuid="cat"))

        assert (await one.chat(request(named("cat"))))[0] == 200


async def test_a_name_that_one_proxy_could_not_write_is_found_when_another_did(
    launch: Launch, backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with caching(launch, backed, url) as one, caching(launch, backed, url) as other:
        for content in (b"1", b"2"):
            await push(one, image(content))
        await push(one, image(b"1", uuid="cat"))
        with monkeypatch.context() as full:
            full.setattr(SharedDiskStore, "put", has_no_room)
            await items_of(one, request(image(b"2", uuid="cat")))
        assert (await one.chat(request(named("cat"))))[0] == 404
        await push(other, image(b"2", uuid="cat"))

        assert await items_of(one, request(named("cat"))) == {"hit": 1}
        assert one.d.calls[-1].parts[0]["uuid"] == one.d.calls[0].parts[0]["uuid"]


async def test_a_name_may_be_used_while_it_is_given_to_another_picture(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        for data in (b"1", b"0"):
            await items_of(fleet, request(image(data, uuid="cat")))
        await settled(backed)  # the name of an entry that is being written is unknown

        async def swap() -> None:
            for number in range(20):
                await items_of(fleet, request(image(b"%d" % (number % 2), uuid="cat")))

        async def use() -> list[int]:
            return [(await fleet.chat(request(named("cat"))))[0] for _ in range(20)]

        _, *statuses = await asyncio.gather(swap(), use(), use())
        assert statuses == [[200] * 20] * 2


async def test_a_remote_picture_with_options_has_no_name(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url, trust_request_mm_kwargs=True) as fleet:
        remote = image("https://host/cat.png", uuid="cat")
        await items_of(fleet, request(remote, mm_processor_kwargs={"max_pixels": 100}))
        await settled(backed)

        assert (await fleet.chat(request(named("cat"))))[0] == 404


@pytest.mark.parametrize("slow_s", [0.05, 3.0])
async def test_a_slow_store_is_waited_for_and_then_a_503(
    launch: Launch, backed: Backed, url: str, slow_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = type(backed.store).lookup

    def slow(*args: Any) -> list[Any]:
        time.sleep(slow_s)
        return lookup(*args)

    async with caching(launch, backed, url, ec_store_budget_s=0.02) as fleet:
        await push(fleet, image(b"cat", uuid="cat"))
        monkeypatch.setattr(SharedDiskStore, "lookup", slow)
        status, reply = await fleet.chat(request(named("cat")))

        assert status == (200 if slow_s < 1 else 503), reply


async def test_a_named_item_beside_one_that_cannot_be_encoded(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        await push(fleet, image(b"cat", uuid="cat"))
        fleet.e.chat = refuses(503, "busy")
        status, reply = await fleet.chat(request(named("cat"), image(b"dog")))

        assert (status, reply["error"]["param"]) == (503, "messages[0].content[1]")


# Tenants


@pytest.mark.security("S11")
async def test_a_media_name_belongs_to_one_tenant(
    launch: Launch, backed: Backed, url: str, keys: Path
) -> None:
    async with caching(launch, backed, url, api_keys_file=keys) as fleet:
        await push(fleet, image(b"cat", uuid="cat"), key=ALICE)

        assert (await fleet.chat(request(named("cat")), bearer(ALICE_2)))[0] == 200
        status, reply = await fleet.chat(request(named("cat")), bearer(BOB))
        never, other = await fleet.chat(request(named("never")), bearer(BOB))
        assert (status, reply) == (never, other)
        assert (status, (await forget(fleet, "cat", BOB))[0]) == (404, 404)
        assert (await fleet.chat(request(named("cat")), bearer(ALICE)))[0] == 200


async def test_tenants_do_not_share_a_picture(
    launch: Launch, backed: Backed, url: str, keys: Path
) -> None:
    async with caching(launch, backed, url, api_keys_file=keys) as fleet:
        body = request(image(b"cat", uuid="cat"))
        said = []
        for key in (ALICE, BOB, ALICE, BOB):
            async with fleet.post(body, bearer(key)) as reply:
                assert reply.status == 200
                stages = reply.headers["Server-Timing"].replace(";", " ").replace(",", " ").split()
                timed = [word for word in stages if "=" not in word]
                said.append((reply.headers["x-epd-items"], timed))
            await settled(backed)

        assert encoded(fleet) == 2
        assert said[0] == said[1]
        assert said[2] == said[3]
        assert said[0] != said[2]


async def test_deleting_a_name_keeps_entries_keyed_by_engines(
    launch: Launch, backed: Backed, url: str, keys: Path
) -> None:
    async with caching(launch, backed, url, api_keys_file=keys) as fleet:
        for key in (ALICE, BOB):
            assert (await push(fleet, image("https://host/cat.png", uuid="cat"), key=key))[0] == 200
        assert (await forget(fleet, "cat", ALICE))[0] == 200

        assert (await fleet.chat(request(named("cat")), bearer(ALICE)))[0] == 404
        assert (await fleet.chat(request(named("cat")), bearer(BOB)))[0] == 200


async def test_sharing_tenants_share_pictures_but_not_names(
    launch: Launch, backed: Backed, url: str, keys: Path
) -> None:
    async with caching(launch, backed, url, api_keys_file=keys, isolation="shared") as fleet:
        assert (await push(fleet, image(b"cat", uuid="cat"), key=ALICE))[0] == 200
        assert (await fleet.chat(request(named("cat")), bearer(BOB)))[0] == 404
        assert (await push(fleet, image(b"cat", uuid="cat"), key=BOB))[0] == 200
        assert encoded(fleet) == 1

        assert (await forget(fleet, "cat", ALICE))[0] == 200
        assert (await push(fleet, image(b"cat"), key=BOB))[1]["data"][0]["result"] == "hit"


KEY = "instances-key-0123456789"


def judging(fleet: Fleet) -> None:
    """Make the instances check keys, as if started with `--api-key`."""
    for instance in fleet.instances:
        instance.api_key = KEY


@pytest.mark.security("S2")
@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_client_with_a_rejected_key_neither_changes_media_nor_learns_of_them(
    launch: Launch, backed: Backed, url: str, key: str | None
) -> None:
    async with caching(launch, backed, url, prefill=1) as fleet:
        judging(fleet)
        assert (await push(fleet, image(b"cat", uuid="cat"), key=KEY))[0] == 200
        await settled(backed)
        sent = len(fleet.e.calls)

        assert (await push(fleet, image(b"cat"), key=key))[0] == 401
        assert (await forget(fleet, "cat", key))[0] == 401
        async with fleet.http.get(f"{fleet.url}/version", headers=bearer(key or "")) as reply:
            assert reply.status == 401
        # The answer does not reveal whether the item is stored or its name is known.
        answers = [await refused(fleet, part, key) for part in (image(b"cat"), image(b"dog"))]
        assert answers[0] == answers[1]
        answers = [await refused(fleet, named(name), key) for name in ("cat", "dog")]
        assert answers[0] == answers[1]

        assert len(fleet.e.calls) == sent
        status, _ = await fleet.chat(request(named("cat"), model="m"), bearer(KEY))
        assert status == 200
        assert (await forget(fleet, "cat", KEY))[0] == 200


async def refused(
    fleet: Fleet, part: Part, key: str | None
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers of a rejected chat, without what differs per request."""
    async with fleet.post(request(part, model="m"), bearer(key) if key else None) as reply:
        assert reply.status == 401
        each = {"x-request-id", "date"}
        headers = {name.lower(): value for name, value in reply.headers.items()}
        assert {"x-epd-items", "x-epd-media", "server-timing", "x-epd-degraded"}.isdisjoint(headers)
        kept = {name: value for name, value in headers.items() if name not in each}
        return reply.status, await reply.json(), kept


@pytest.mark.security("S2")
async def test_an_instances_word_on_a_key_is_remembered_and_its_refusal_is_not(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        judging(fleet)
        for _ in range(3):
            assert (await forget(fleet, "cat", KEY))[0] in {200, 404}
        assert fleet.d.other_calls.count("GET /v1/models") == 1
        for _ in range(3):
            assert (await forget(fleet, "cat", "wrong"))[0] == 401
        assert fleet.d.other_calls.count("GET /v1/models") == 4


async def test_with_keys_of_the_proxys_own_no_instance_is_asked(
    launch: Launch, backed: Backed, url: str, keys: Path
) -> None:
    async with caching(launch, backed, url, api_keys_file=keys) as fleet:
        await forget(fleet, "cat", ALICE)

        assert "GET /v1/models" not in fleet.d.other_calls
