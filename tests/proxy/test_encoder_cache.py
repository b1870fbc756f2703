"""The proxy with a store: encode instances write to it, decode instances read from it."""

import asyncio
import json
import shutil
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from ec_store import Entry, EntryKey, open_store
from ec_store.disk.store import SharedDiskStore
from epd.observe.request_log import LogObserver
from epd.server.app_keys import CONFIG
from tests.requests import Part, image, input_audio, request, text, video
from tests.support.backed import (
    NAMESPACE,
    Backed,
    cache_settings,
    caching,
    encoded,
    items_of,
    limit_claims,
    media_types,
    opened_cache,
    parts_of,
    refresh_stores,
)
from tests.support.fake_instance import (
    STREAM,
    chunk,
    decodes,
    fails_first,
    hangs,
    prefills,
    refuses,
    streams,
)
from tests.support.fleet import Launch, until


async def test_a_picture_seen_before_costs_no_encode_and_no_upload(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url, prefill=1) as fleet:
        body = request(text(), image(b"x" * 100_000))
        first = await items_of(fleet, body)
        await asyncio.gather(*backed.writes)
        second = await items_of(fleet, body)

        assert (first, second) == ({"encoded": 1}, {"hit": 1})
        assert encoded(fleet) == 1
        for instance in (fleet.p, fleet.d):
            assert media_types(instance) == [["text", "image_embeds"]] * 2
            assert len(json.dumps(instance.calls[1].body)) < 2000
        assert "ec_transfer_params" not in fleet.d.calls[1].body
        first_part, second_part = (call.parts[1] for call in fleet.d.calls)
        assert first_part == second_part


async def test_a_picture_twice_in_a_request_is_one_encode(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        assert await items_of(fleet, request(image(), image())) == {"encoded": 1, "hit": 1}
        assert encoded(fleet) == 1


@pytest.mark.parametrize("with_store", [True, False])
async def test_requests_at_once_for_a_new_picture_are_one_encode(
    launch: Launch, backed: Backed, url: str, with_store: bool
) -> None:
    backed.encode_s = 0.3
    async with caching(launch, backed, url if with_store else "none") as fleet:
        done = await asyncio.gather(*(items_of(fleet, request(image())) for _ in range(16)))

        assert encoded(fleet) == 1
        assert sorted(map(str, done)) == sorted(["{'encoded': 1}", *["{'hit': 1}"] * 15])


async def test_proxies_on_one_store_encode_a_new_picture_once(
    launch: Launch, backed: Backed, url: str
) -> None:
    backed.encode_s, backed.write_s = 0.3, 0.2
    async with caching(launch, backed, url) as one, caching(launch, backed, url) as other:
        fleets = [one, other] * 8
        await asyncio.gather(*(items_of(fleet, request(image())) for fleet in fleets))

        assert encoded(one) + encoded(other) == 1


async def test_an_entry_that_is_being_written_is_not_encoded_again(
    launch: Launch, backed: Backed, url: str
) -> None:
    backed.write_s = 0.5
    async with caching(launch, backed, url) as fleet:
        fleet.d.chat = decodes  # which does not wait for the entry
        for result in ("encoded", "hit"):
            assert await items_of(fleet, request(image())) == {result: 1}


async def test_requests_that_wait_for_a_failed_encode_make_one_more(
    launch: Launch, backed: Backed, url: str, joined: list[object]
) -> None:
    async with caching(launch, backed, url, on_encode_failure="fail") as fleet:

        async def fails(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await until(lambda: len(joined) == 6)
            fleet.e.chat = backed.encodes
            return await refuses(400, "no")(asked, body)

        fleet.e.chat = fails
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(fleet.chat(request(image()))) for _ in range(6)]

        assert sorted(task.result()[0] for task in asked) == [200] * 5 + [400]
        assert encoded(fleet) == 2


async def test_the_wait_for_a_claim_of_a_dead_holder_is_bounded(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        await items_of(fleet, request(image()))
        await asyncio.gather(*backed.writes)
        assert await items_of(fleet, request(image())) == {"hit": 1}  # so its entry is not late
        key = EntryKey(NAMESPACE, fleet.d.calls[0].parts[0]["uuid"])
        # The proxy releases its own claim after a second.
        await until(lambda: backed.store.claim([key], "dead", 1.0) == [True])
        await backed.forget()

        assert await items_of(fleet, request(image())) == {"encoded": 1}
        await until(lambda: backed.store.claim([key], "other", 1.0) == [True])


@pytest.mark.fault(21)
@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("how", ["deleted", "corrupted"])
async def test_an_entry_lost_between_lookup_and_load_does_not_fail_the_request(
    launch: Launch, backed: Backed, url: str, prefill: int, how: str
) -> None:
    async with caching(launch, backed, url, prefill=prefill) as fleet:
        await items_of(fleet, request(image(), text()))
        loader = fleet.p if prefill else fleet.d
        answers = loader.chat

        async def loses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            loader.chat = answers
            if how == "deleted":
                await backed.forget()
            else:
                await backed.corrupt()
            [part] = [part for part in parts_of(body) if part["type"] == "image_embeds"]
            assert backed.store.get(EntryKey(NAMESPACE, part["uuid"])) is None
            return await refuses(500, "Internal server error")(request, body)

        loader.chat = loses
        assert await items_of(fleet, request(image(), text())) == {"encoded": 1}
        assert encoded(fleet) == 2
        assert media_types(loader)[1:] == [["image_embeds", "text"], ["image_url", "text"]]
        assert loader.calls[1].parts[0]["uuid"] == loader.calls[2].parts[0]["uuid"]
        assert [done.retries for done in fleet.events.requests] == [0, 1]


FAILED = {"message": "Internal server error", "type": "x", "param": None, "code": 500}
FAILED_STREAM = [
    chunk(""),
    b"data: %b\n\n" % json.dumps({"error": FAILED}).encode(),
    b"data: [DONE]\n\n",
]
"""Stream of vLLM for a request that fails before its first token."""


@pytest.mark.fault(21)
async def test_an_entry_lost_between_lookup_and_load_does_not_fail_a_stream(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        await items_of(fleet, request(image(), text()))
        answers = fleet.d.chat

        async def loses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            fleet.d.chat = answers
            return await streams(FAILED_STREAM)(request, body)

        fleet.d.chat = loses
        async with fleet.post(request(image(), text(), stream=True)) as reply:
            assert reply.status == 200
            assert await reply.read() == b"".join(STREAM)
        assert [done.retries for done in fleet.events.requests] == [0, 1]


async def test_a_stream_that_fails_each_time_before_its_first_token_is_a_500(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        fleet.d.chat = streams(FAILED_STREAM)
        status, reply = await fleet.chat(request(image(), text(), stream=True))

        assert (status, reply["error"]["message"]) == (500, "Internal server error")
        assert len(fleet.d.calls) == 3


async def test_a_stream_that_fails_after_its_first_token_is_relayed(
    launch: Launch, backed: Backed, url: str
) -> None:
    events = [STREAM[0], STREAM[1], *FAILED_STREAM[1:]]
    async with caching(launch, backed, url) as fleet:
        fleet.d.chat = streams(events)
        async with fleet.post(request(image(), text(), stream=True)) as reply:
            assert (reply.status, await reply.read()) == (200, b"".join(events))
        assert len(fleet.d.calls) == 1


@pytest.mark.parametrize("stops", [True, False])
async def test_the_first_event_of_a_stream_is_not_held_back_for_long(
    launch: Launch, backed: Backed, url: str, stops: bool
) -> None:
    """The second event comes much later, or only the end of the answer does."""
    second = asyncio.Event()

    async def slow(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STREAM[0])
        await second.wait()
        for event in STREAM[2:] if stops else STREAM[1:]:
            await response.write(event)
        return response

    async with caching(launch, backed, url) as fleet:
        fleet.d.chat = slow
        async with fleet.post(request(image(), text(), stream=True)) as reply:
            assert await reply.content.readuntil(b"\n\n") == STREAM[0]
            second.set()
            rest = STREAM[2:] if stops else STREAM[1:]
            assert await reply.read() == b"".join(rest)


@pytest.mark.fault(21)
@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("busy", [False, True])
async def test_media_are_sent_without_names_if_their_consumer_has_cached_the_names_alone(
    launch: Launch, backed: Backed, url: str, prefill: int, busy: bool
) -> None:
    """The cache of processed media in vLLM returns what it first saw under a name.

    Requests that the consumer answers meanwhile do not show that this one is at fault.
    """

    async def forgets(sent: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        named = any("uuid" in part for part in parts_of(body))
        answer = prefills if prefill else decodes
        if named and busy:
            assert (await fleet.chat(request(text())))[0] == 200
        return await (refuses(500, "no media") if named else answer)(sent, body)

    async with caching(launch, backed, url, prefill=prefill, on_prefill_failure="fail") as fleet:
        loader = fleet.p if prefill else fleet.d
        loader.chat = forgets
        assert await items_of(fleet, request(image(), text())) == {"encoded": 1}

        sent = [call for call in loader.calls if len(call.parts) == 2]
        kinds = [["image_embeds", "text"], ["image_url", "text"], ["image_url", "text"]]
        assert [[part["type"] for part in call.parts] for call in sent] == kinds
        assert ["uuid" in call.parts[0] for call in sent] == [True, True, False]


async def test_an_error_other_than_a_lost_entry_is_not_retried(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        fleet.d.chat = refuses(422, "too long")
        status, _ = await fleet.chat(request(image()))
        fleet.d.chat = refuses(500, "no")
        also, _ = await fleet.chat(request(text()))

        assert (status, also) == (422, 500)
        assert len(fleet.d.calls) == 2


@pytest.mark.fault(75)
@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_refused_with_metadata_is_retried_once_with_its_media(
    launch: Launch, prefill: int, stream: bool
) -> None:
    async with launch(prefill=prefill) as fleet:
        consumer, then = (fleet.p, prefills) if prefill else (fleet.d, decodes)
        consumer.chat = fails_first(1, refuses(400, "Failed to apply Processor"), then)
        async with fleet.post(request(text(), image(), stream=stream)) as reply:
            assert reply.status == 200

        first, second = consumer.calls
        assert first.parts[1]["type"] == "image_embeds"
        assert second.parts[1]["image_url"] == image()["image_url"]
        assert len(fleet.e.calls) == 1  # its output is looked up by its key
        assert fleet.events.requests[0].retries == 1
        assert fleet.events.changes == []


@pytest.mark.fault(75)
@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_request_refused_with_metadata_and_with_media_ends_in_the_refusal(
    launch: Launch, prefill: int
) -> None:
    async with launch(prefill=prefill) as fleet:
        consumer = fleet.p if prefill else fleet.d
        consumer.chat = refuses(400, "too long")
        status, reply = await fleet.chat(request(text(), image()))
        also, _ = await fleet.chat(request(text()))

        assert (status, reply["error"]["message"], also) == (400, "too long", 400)
        assert len(consumer.calls) == 3  # text alone has no metadata


@pytest.mark.fault(75)
async def test_a_refused_request_without_its_media_is_not_retried(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        assert (await fleet.chat(request(image(uuid="cat"))))[0] == 200
        fleet.d.calls.clear()
        fleet.d.chat = refuses(400, "no")
        status, _ = await fleet.chat(request({"type": "image_url", "uuid": "cat"}))

        assert status == 400
        assert len(fleet.d.calls) == 1


@pytest.mark.fault(16)
@pytest.mark.parametrize("away", ["redis://127.0.0.1:9", "file:///proc/nowhere/store"])
async def test_requests_are_served_without_the_store(
    launch: Launch, backed: Backed, away: str
) -> None:
    async with caching(launch, backed, away) as fleet:
        for _ in range(2):
            assert await items_of(fleet, request(image())) == {"encoded": 1}


@pytest.mark.fault(16)
async def test_a_missing_store_is_logged_once_and_not_created(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    url = folder.as_uri()
    key = EntryKey(NAMESPACE, "picture")
    with capture_logs() as lines:
        async with opened_cache(url, cache_settings(lease_s=1), refresh_s=1.0) as cache:
            await until(lambda: cache.operations["open", "error"] > 1)
            assert await cache.find_entries([key]) is None
            assert (await cache.call("claim", lambda store: store.claim([key], "o", 1))) is None
            assert not folder.exists()

            make_store(url, key)
            await until(lambda: len(lines) == 2)
            assert set(await cache.find_entries([key]) or ()) == {key}

            shutil.rmtree(folder)
            await until(lambda: cache.operations["namespaces", "error"] > 1)
            assert not folder.exists()
            assert await cache.find_entries([key]) == {}

            make_store(url, key)
            await until(lambda: len(lines) == 4)
            assert set(await cache.find_entries([key]) or ()) == {key}

    seen = [(line["event"], line.get("reason")) for line in lines]
    missing = ("there is no encoder store", f"there is no store in {folder}")
    there = ("the encoder store can be used", None)
    assert seen == [missing, there, missing, there]


def make_store(url: str, key: EntryKey) -> None:
    """Create the store and write an entry, as a starting engine does."""
    with open_store(url) as store:
        store.register_namespace("m", NAMESPACE)
        store.put(key, Entry(memoryview(bytes(16)), "F32", (1, 4), "image", {}))


@pytest.mark.fault(16)
async def test_a_store_that_hangs_costs_its_budget_and_then_nothing(
    launch: Launch, backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    asked: list[int] = []

    def lookup(_: object, keys: list[EntryKey]) -> list[None]:
        asked.append(len(keys))
        go.wait(60)
        return [None for _ in keys]

    async with caching(launch, backed, url, ec_store_budget_s=0.02) as fleet:
        await items_of(fleet, request(image()))
        await asyncio.gather(*backed.writes)
        monkeypatch.setattr(SharedDiskStore, "lookup", lookup)
        try:
            done = [await items_of(fleet, request(image())) for _ in range(8)]
        finally:
            go.set()

        assert done == [{"encoded": 1}] * 8
        assert 1 <= len(asked) <= 4


async def test_the_namespace_is_followed_when_it_changes(
    launch: Launch, backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh_stores(monkeypatch, 0.05)
    async with caching(launch, backed, url) as fleet:
        await items_of(fleet, request(image()))
        await asyncio.gather(*backed.writes)
        assert await items_of(fleet, request(image())) == {"hit": 1}
        backed.store.register_namespace("m", "m@other:4567")

        async with asyncio.timeout(20):
            found = {"hit": 1}
            while found == {"hit": 1}:
                found = await items_of(fleet, request(image()))
        assert found == {"encoded": 1}


async def test_the_first_namespace_of_a_store_is_found_before_the_interval_ends(
    tmp_path: Path,
) -> None:
    url = (tmp_path / "store").as_uri()
    with open_store(url) as store:
        async with opened_cache(url, cache_settings(lease_s=1), refresh_s=300) as cache:
            assert cache.namespace("m") is None
            store.register_namespace("m", NAMESPACE)

            await until(lambda: cache.namespace("m") == NAMESPACE)


async def test_a_model_that_the_store_does_not_name_is_learnt_from_its_encoder(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        body = request(image(), model="alias")
        assert await items_of(fleet, body) == {"encoded": 1}
        await asyncio.gather(*backed.writes)

        assert await items_of(fleet, body) == {"hit": 1}


async def test_processor_kwargs_make_another_entry_which_is_found_again(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url, trust_request_mm_kwargs=True) as fleet:
        plain = request(image())
        kwargs = request(image(), mm_processor_kwargs={"max_pixels": 100})
        for body in (plain, kwargs):
            assert await items_of(fleet, body) == {"encoded": 1}
            await asyncio.gather(*backed.writes)
        for body in (plain, kwargs):
            assert await items_of(fleet, body) == {"hit": 1}


@pytest.mark.parametrize(
    ("part", "kind"),
    [(input_audio(), "audio_embeds"), (video(), "video_url"), (image(), "image_embeds")],
    ids=["audio", "video", "image"],
)
async def test_the_form_of_a_hit_depends_on_its_modality(
    launch: Launch, backed: Backed, url: str, part: Part, kind: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        for _ in range(2):
            await items_of(fleet, request(part))
            await asyncio.gather(*backed.writes)

        assert encoded(fleet) == 1
        assert media_types(fleet.d) == [[kind], [kind]]


@pytest.mark.fault(75)
@pytest.mark.parametrize("part", [image(), input_audio()], ids=["image", "audio"])
async def test_a_hit_beside_a_video_is_sent_raw_and_not_encoded_again(
    launch: Launch, backed: Backed, url: str, part: Part
) -> None:
    async with caching(launch, backed, url) as fleet:
        await items_of(fleet, request(part))
        await asyncio.gather(*backed.writes)
        assert await items_of(fleet, request(part, video())) == {"hit": 1, "encoded": 1}

        assert encoded(fleet) == 2
        assert media_types(fleet.d)[-1] == [part["type"], "video_url"]


# Single flight


async def test_an_abandoned_encode_is_cancelled(
    launch: Launch, backed: Backed, url: str, joined: list[object]
) -> None:
    async with caching(launch, backed, url) as fleet:
        fleet.e.chat = hangs
        clients = [asyncio.create_task(items_of(fleet, request(image()))) for _ in range(2)]
        await until(lambda: encoded(fleet) == 1 and len(joined) == 2)
        clients[0].cancel()
        await until(lambda: fleet.events.requests)
        assert fleet.e.aborted == 0
        clients[1].cancel()

        await until(lambda: fleet.e.aborted == 1)
        fleet.e.chat = backed.encodes
        assert await items_of(fleet, request(image())) == {"encoded": 1}


# Choice of the encode instance, and its failures


async def test_a_picture_goes_to_the_same_instance_again(launch: Launch) -> None:
    async with launch(encode=3) as fleet:
        for _ in range(2):
            for number in range(24):
                await fleet.chat(request(image(b"%d" % number)))
        uuids = [{call.parts[0]["uuid"] for call in one.calls} for one in fleet.encode]

        assert sum(len(one.calls) for one in fleet.encode) == 48
        assert all(not a & b for a, b in pairwise([*uuids, uuids[0]]))
        assert sum(map(bool, uuids)) > 1


async def test_an_item_is_sent_to_three_instances_at_most(launch: Launch) -> None:
    async with launch(encode=5, on_encode_failure="fail") as fleet:
        for instance in fleet.encode:
            instance.chat = refuses(502)
        status, _ = await fleet.chat(request(image()))

        assert status == 502
        assert encoded(fleet) == 3


async def test_a_wrong_key_fails_only_its_own_request(
    launch: Launch, backed: Backed, url: str
) -> None:
    async def checks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        if request.headers["Authorization"] != "Bearer good":
            return await refuses(401, "wrong key")(request, body)
        return await backed.encodes(request, body)

    async with caching(launch, backed, url) as fleet:
        fleet.e.chat = checks
        tokens = ["bad", "bad", "good", "good"]
        replies = await asyncio.gather(
            *(
                fleet.chat(request(image()), {"Authorization": f"Bearer {token}"})
                for token in tokens
            )
        )

        assert [status for status, _ in replies[2:]] == [200, 200]


async def test_errors_name_the_failed_item_of_each_client(launch: Launch) -> None:
    async def fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return await refuses(400, "no picture")(request, body)

    async with launch() as fleet:
        fleet.e.chat = fails
        bodies = [request(*[text()] * number, image()) for number in range(4)]
        replies = await asyncio.gather(*map(fleet.chat, bodies))

        params = [reply["error"]["param"] for _, reply in replies]
        assert params == [f"messages[0].content[{number}]" for number in range(4)]


async def test_a_claim_of_a_disconnected_client_is_released(
    launch: Launch, backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_claims(monkeypatch, claim_s=3600.0, tend_s=0.1)  # the claim does not expire
    claim = type(backed.store).claim

    def slow(*args: Any, **options: Any) -> list[bool]:
        time.sleep(0.3)
        return claim(*args, **options)

    async with caching(launch, backed, url) as fleet:
        await items_of(fleet, request(image()))
        key = EntryKey(NAMESPACE, fleet.d.calls[0].parts[0]["uuid"])
        await until(lambda: backed.store.claim([key], "other", 0.1) == [True])
        await backed.forget()
        await asyncio.sleep(0.2)
        with monkeypatch.context() as slowly:
            slowly.setattr(SharedDiskStore, "claim", slow)
            client = asyncio.create_task(items_of(fleet, request(image())))
            await asyncio.sleep(0.2)
            client.cancel()
            await asyncio.sleep(0.5)

        await until(lambda: backed.store.claim([key], "another", 1.0) == [True])


async def test_sources_of_items_are_counted_and_logged(
    launch: Launch, backed: Backed, url: str
) -> None:
    async with caching(launch, backed, url) as fleet:
        await items_of(fleet, request(image(b"1")))
        await asyncio.gather(*backed.writes)
        fleet.e.chat = refuses(503)
        async with fleet.post(request(image(b"1"), image(b"2"))) as reply:
            assert reply.headers["x-epd-items"] == "hit=1,encoded=0,local=1"
            assert reply.headers["x-epd-media"] == "metadata=0,raw=2"
            stages = {part.split(";")[0] for part in reply.headers["Server-Timing"].split(", ")}
        async with fleet.http.get(f"{fleet.url}/metrics") as page:
            text = await page.text()
        live = fleet.runner.app[CONFIG]
        with capture_logs() as lines:
            LogObserver(live).request_done(fleet.events.requests[-2])

    assert stages == {"store", "encode", "decode"}
    values = Counter[tuple[str, ...]]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: sample.labels[name] for name in sample.labels if name != "model_name"}
            values[sample.name, *labels.values()] += int(sample.value)
    assert {
        result: values["epd_items_total", result] for result in ("hit", "encoded", "local")
    } == {
        "hit": 1,
        "encoded": 1,
        "local": 1,
    }
    assert values["epd_requests_total", "/v1/chat/completions", "200"] == 2
    assert values["epd_stage_seconds_count", "false", "store"] == 2
    assert values["epd_request_retries_total",] == 0
    assert [line["items"] for line in lines] == ["hit=1,local=1"]
