"""vLLM's own encoder-cache transfers, with fake instances that check each parameter."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epd.routing.instances import Role
from tests.requests import image, input_audio, request, text, video
from tests.support.fake_instance import (
    FakeInstance,
    Handler,
    drops,
    encodes_without_params,
    fails_first,
    hangs,
    prefills,
    refuses,
)
from tests.support.fleet import Fleet, Launch, until
from tests.support.redis_server import RedisServer
from tests.support.registration import KEY, empty, listing, register, taking_part
from tests.support.strict_encode import Memory, Pushes

SOUND = {"mm_processor_kwargs": {"use_audio_in_video": True}}


def addresses(decode: int, ranks: int = 1) -> tuple[str, ...]:
    return tuple(f"tcp://d{n}:{19019 + rank}" for n in range(decode) for rank in range(ranks))


@asynccontextmanager
async def mooncake(
    launch: Launch, pushes: Pushes, encode: int = 1, decode: int = 1, ranks: int = 1, **config: Any
) -> AsyncIterator[Fleet]:
    """Run E+PD with ECMooncakeConnector."""
    where = addresses(decode, ranks)
    settings: dict[str, Any] = {
        "ec_consumer_zmq_addrs": where,
        "ec_consumer_dp_size": ranks,
    } | config
    async with launch(encode=encode, decode=decode, **settings) as fleet:
        for one in fleet.encode:
            one.chat = pushes.encodes
        for number, one in enumerate(fleet.decode):
            one.chat = pushes.consumes(*where[number * ranks : (number + 1) * ranks])
        yield fleet
    assert pushes.wrong == []


@asynccontextmanager
async def nixl(
    launch: Launch, memory: Memory, encode: int = 1, prefill: int = 0, **config: Any
) -> AsyncIterator[Fleet]:
    """Run E+PD or E+P+D with ECCPUConnector."""
    async with launch(encode=encode, prefill=prefill, ec_transfer="nixl", **config) as fleet:
        for port, one in enumerate(fleet.encode, 5601):
            one.chat = memory.encodes(port)
        for one in fleet.prefill:
            one.chat = memory.consumes(prefills)
        if not prefill:
            fleet.d.chat = memory.consumes()
        yield fleet
    assert memory.wrong == []


async def ask(fleet: Fleet, body: dict[str, Any]) -> None:
    """Send a request, and check that it succeeds."""
    async with fleet.post(body) as reply:
        said = await reply.text()
        assert reply.status == 200, said
        assert ("[DONE]" in said) == bool(body.get("stream"))


def kinds(instance: FakeInstance, call: int = -1) -> list[str]:
    return [part["type"] for part in instance.calls[call].parts]


def ids_of(instance: FakeInstance, call: int = -1) -> list[str]:
    """Return the transfer ids that an instance received."""
    params = instance.calls[call].body["ec_transfer_params"]
    return [item["transfer_id"] for item in params["ec_items"]]


def hashes_of(instance: FakeInstance, call: int = -1) -> list[str]:
    params = instance.calls[call].body["ec_transfer_params"]
    return [item["mm_hash"] for item in params["ec_items"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("media", ["metadata", "raw"])
async def test_an_output_is_pushed_to_the_consumer_that_answers(
    launch: Launch, stream: bool, media: str
) -> None:
    pushes = Pushes()
    async with mooncake(launch, pushes, decode=2, decode_media=media) as fleet:
        for turn in range(4):
            await ask(fleet, request(text(), image(bytes([turn])), stream=stream))

        assert [len(one.calls) for one in fleet.decode] == [2, 2]
        kind = "image_embeds" if media == "metadata" else "image_url"
        assert {tuple(kinds(one)) for one in fleet.decode} == {("text", kind)}
    assert pushes.waiting == {}


async def test_a_text_request_has_no_parameters_of_pushes(launch: Launch) -> None:
    async with mooncake(launch, Pushes()) as fleet:
        await ask(fleet, request(text()))

        [call] = fleet.decode[0].calls
        assert "ec_transfer_params" not in call.body


async def test_a_consumer_chosen_early_gets_a_prompt_with_the_tokens_of_the_encoder(
    launch: Launch,
) -> None:
    async with mooncake(launch, Pushes(), decode_balance="content") as fleet:
        for _ in range(2):
            await ask(fleet, request(image()))

        first, second = (one.prefix_tokens for one in fleet.events.requests)
        assert first == 0
        assert second == pytest.approx(1 * 36 * 54 // 4, abs=20)  # and not a typical picture's


async def test_items_are_pushed_separately_and_repeated_pictures_twice(launch: Launch) -> None:
    pushes = Pushes()
    async with mooncake(launch, pushes, encode=2) as fleet:
        await ask(fleet, request(image(b"1"), input_audio(), image(b"2"), image(b"1")))

        assert len(set(ids_of(fleet.d))) == 4
        first, _, third, fourth = hashes_of(fleet.d)
        assert first == fourth != third
        assert sum(len(one.calls) for one in fleet.encode) == 4
    assert pushes.waiting == {}


async def test_a_picture_that_came_before_is_pushed_again(launch: Launch) -> None:
    pushes = Pushes()
    async with mooncake(launch, pushes) as fleet:
        for _ in range(2):
            await ask(fleet, request(image()))
        await asyncio.gather(*(ask(fleet, request(image())) for _ in range(4)))

        assert len(fleet.e.calls) == 6
        assert all(event.items == {"encoded": 1} for event in fleet.events.requests)
    assert pushes.waiting == {}


async def test_a_video_and_its_sound_have_an_id_each(launch: Launch) -> None:
    pushes = Pushes()
    async with mooncake(launch, pushes, trust_request_mm_kwargs=True) as fleet:
        await ask(fleet, request(text(), video(), **SOUND))

        assert len(ids_of(fleet.e)) == 2
        # The video's id is first, as in vLLM's example.
        assert ids_of(fleet.d) == ids_of(fleet.e)[::-1]
        assert kinds(fleet.d) == ["text", "video_url"]
    assert pushes.waiting == {}


async def test_the_rank_of_the_push_answers(launch: Launch) -> None:
    pushes = Pushes()
    async with mooncake(launch, pushes, decode=2, ranks=2) as fleet:
        for turn in range(8):
            await ask(fleet, request(image(bytes([turn])), image(b"same")))

        assert {where for where, _ in pushes.pushed} == set(addresses(2, 2))
        ranks = [call.headers["X-data-parallel-rank"] for call in fleet.d.calls]
        assert sorted(ranks) == ["0", "0", "1", "1"]
        encoded = [call.headers for call in fleet.e.calls]
        assert not any("X-data-parallel-rank" in headers for headers in encoded)


async def test_a_consumer_counts_as_loaded_while_its_item_is_encoded(launch: Launch) -> None:
    pushes = Pushes()
    async with mooncake(launch, pushes, decode=2) as fleet:
        fleet.e.chat = hangs
        held = asyncio.create_task(fleet.chat(request(image())))
        await until(lambda: fleet.e.calls)
        where = fleet.e.calls[0].body["ec_transfer_params"]["consumer_zmq"]
        for _ in range(4):
            await ask(fleet, request(text()))

        busy = addresses(2).index(where)
        assert [len(fleet.decode[one].calls) for one in (busy, 1 - busy)] == [0, 4]
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


@pytest.mark.parametrize("fault", [drops, refuses(500), refuses(503)])
async def test_a_retried_encode_has_new_ids(launch: Launch, fault: Handler) -> None:
    pushes = Pushes()
    async with mooncake(launch, pushes, encode=2) as fleet:
        for one in fleet.encode:
            one.chat = pushes.encodes
        first, other = fleet.encode
        first.chat = other.chat = fails_first(1, fault, pushes.encodes)
        await ask(fleet, request(image()))

        tried = [ids_of(one, call) for one in fleet.encode for call in range(len(one.calls))]
        assert len(tried) == 2
        assert tried[0] != tried[1]
        assert len(pushes.pushed) == 1


@pytest.mark.parametrize("fault", [drops, refuses(503), refuses(500)])
async def test_all_items_are_encoded_again_for_another_consumer(
    launch: Launch, fault: Handler
) -> None:
    pushes = Pushes()
    async with mooncake(launch, pushes, decode=2) as fleet:
        there = [one.chat for one in fleet.decode]
        faulty = fails_first(1, fault, hangs)
        calls = 0

        def at(number: int) -> Handler:
            async def chat(*call: Any) -> Any:
                nonlocal calls
                calls += 1
                return await (faulty if calls == 1 else there[number])(*call)

            return chat

        for number, one in enumerate(fleet.decode):
            one.chat = at(number)
        await ask(fleet, request(image(b"1"), image(b"2")))

        assert [len(one.calls) for one in fleet.decode] == [1, 1]
        assert len(fleet.e.calls) == 4
        assert len(set(pushes.pushed)) == 4
        assert len({where for where, _ in pushes.pushed}) == 2


@pytest.mark.parametrize(("media", "kind"), [("metadata", "image_embeds"), ("raw", "image_url")])
async def test_a_lost_push_is_repeated_with_the_media(
    launch: Launch, media: str, kind: str
) -> None:
    pushes = Pushes()
    async with mooncake(launch, pushes, decode_media=media, eject_after=1) as fleet:

        async def loses(*call: Any) -> Any:
            reply = await pushes.encodes(*call)
            if len(pushes.pushed) == 1:
                pushes.waiting.clear()
            return reply

        fleet.e.chat = loses
        await ask(fleet, request(image()))

        assert [kinds(fleet.d, call) for call in (0, 1)] == [[kind], ["image_url"]]
        assert ids_of(fleet.d, 0) != ids_of(fleet.d, 1)
        assert not fleet.events.changes  # the consumer is not at fault


@pytest.mark.fault(75)
@pytest.mark.parametrize(("media", "requests"), [("metadata", 2), ("raw", 1)])
async def test_a_400_is_repeated_only_if_media_were_not_sent(
    launch: Launch, media: str, requests: int
) -> None:
    async with mooncake(launch, Pushes(), decode_media=media) as fleet:
        fleet.d.chat = refuses(400, "too long")
        status, _ = await fleet.chat(request(image()))

        assert status == 400
        assert len(fleet.d.calls) == len(fleet.e.calls) == requests


async def test_ids_that_an_encode_instance_makes_up_do_not_count(launch: Launch) -> None:
    pushes = Pushes(own_ids=True)
    async with mooncake(launch, pushes) as fleet:
        await ask(fleet, request(image()))

        assert ids_of(fleet.d) == ids_of(fleet.e)


@pytest.mark.parametrize(
    ("chat", "status", "error"),
    [
        (refuses(500), 502, "encode_failed"),
        (encodes_without_params, 502, "encode_metadata"),
    ],
)
async def test_an_output_that_was_not_pushed_is_not_encoded_by_the_consumer(
    launch: Launch, chat: Handler, status: int, error: str
) -> None:
    async with mooncake(launch, Pushes()) as fleet:
        fleet.e.chat = chat
        async with fleet.post(request(image())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (status, error)
        assert fleet.d.calls == []


async def test_a_consumer_registers_with_its_address_for_pushed_outputs(
    launch: Launch, tmp_path: Path
) -> None:
    pushes = Pushes()
    where = ["tcp://pd:19019", "tcp://pd:19021"]
    with RedisServer(tmp_path / "redis") as redis:
        store = {"registration_store": redis.url(), "ec_transfer": "mooncake"}
        async with FakeInstance(pushes.consumes(*where)).running() as consumer:
            async with empty(launch, **store) as fleet:
                body = {"role": "prefill_decode", "url": consumer.url, "dp_size": 2}
                assert (await register(fleet, body))[0] == 400
                assert (await register(fleet, {**body, "ec_zmq_addrs": where[:1]}))[0] == 422
                assert (await register(fleet, {**body, "ec_zmq_addrs": ["pd", "pd"]}))[0] == 422
                assert (await register(fleet, {**body, "ec_zmq_addrs": where}))[0] == 200
            async with empty(launch, **store) as fleet, taking_part(fleet, Role.ENCODE) as encode:
                encode.chat = pushes.encodes
                for turn in range(2):
                    await ask(fleet, request(image(bytes([turn]))))
                rows = (await listing(fleet))["instances"]
                assert {row["dp_size"] for row in rows} == {2, 1}
    assert {address for address, _ in pushes.pushed} == set(where)
    assert (pushes.wrong, pushes.waiting) == ([], {})


async def test_a_prefill_instance_that_registers_is_pushed_to(launch: Launch) -> None:
    pushes = Pushes()
    where = "tcp://p:19019"
    async with (
        empty(launch, ec_transfer="mooncake") as fleet,
        taking_part(fleet, Role.ENCODE) as encode,
        taking_part(fleet, Role.PREFILL, ec_zmq_addrs=[where]) as prefill,
        taking_part(fleet, Role.DECODE) as decode,
    ):
        encode.chat, prefill.chat = pushes.encodes, pushes.consumes(where, then=prefills)
        await ask(fleet, request(text(), image()))

        assert kinds(decode) == ["text", "image_embeds"]
        assert (pushes.wrong, pushes.waiting) == ([], {})
        prefill.chat = refuses(503)  # decode, which receives no push, does everything
        await ask(fleet, request(text(), image(b"other")))
        assert kinds(decode) == ["text", "image_url"]
        assert "ec_transfer_params" not in decode.calls[-1].body
        assert fleet.events.requests[-1].degraded == {"prefill-local"}


async def test_the_rank_of_the_push_prefills(launch: Launch) -> None:
    pushes = Pushes()
    where = ["tcp://p:19019", "tcp://p:19020"]
    async with (
        empty(launch, ec_transfer="mooncake") as fleet,
        taking_part(fleet, Role.ENCODE) as encode,
        taking_part(fleet, Role.PREFILL, dp_size=2, ec_zmq_addrs=where) as prefill,
        taking_part(fleet, Role.DECODE),
    ):
        encode.chat, prefill.chat = pushes.encodes, pushes.consumes(*where, then=prefills)
        for _ in range(3):
            await ask(fleet, request(text(), image()))

        assert (pushes.wrong, pushes.waiting) == ([], {})
        assert {one.headers["X-data-parallel-rank"] for one in prefill.calls} == {"0", "1"}


async def test_a_consumer_without_an_address_is_not_chosen(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "instances.yaml"
    async with FakeInstance(refuses(500)).running() as consumer:
        file.write_text(f"instances: [{{role: prefill_decode, url: '{consumer.url}'}}]")
        config: dict[str, Any] = {"instances_file": file, "ec_transfer": "mooncake"}
        async with launch(decode=0, **config) as fleet:
            async with fleet.post(request(image())) as reply:
                assert (reply.status, reply.headers["x-epd-error"]) == (503, "no_ec_address")
            assert fleet.e.calls == consumer.calls == []


@pytest.mark.parametrize("transfer", ["store", "example", "nixl"])
async def test_addresses_are_refused_where_nothing_is_pushed(launch: Launch, transfer: str) -> None:
    body = {"role": "prefill_decode", "url": "http://pd:1", "ec_zmq_addrs": ["tcp://pd:19019"]}
    async with empty(launch, ec_transfer=transfer, admin_api_key=KEY) as fleet:
        status, said = await register(fleet, body)

        assert status == 400
        assert f"--ec-transfer {transfer}" in said["error"]["message"]


async def test_requests_at_the_same_time_read_one_output(
    launch: Launch, joined: list[object]
) -> None:
    memory = Memory()
    async with nixl(launch, memory) as fleet:
        encodes = fleet.e.chat

        async def waits(*call: Any) -> Any:
            await until(lambda: len(joined) == 2)
            return await encodes(*call)

        fleet.e.chat = waits
        await asyncio.gather(*(ask(fleet, request(image())) for _ in range(2)))

        assert (len(fleet.e.calls), len(memory.read)) == (1, 2)
        for call in fleet.d.calls:
            [said] = call.body["ec_transfer_params"].values()
            assert said["peer_port"] == 5601


async def test_a_repeated_item_is_encoded_again_without_lookups(
    launch: Launch,
) -> None:
    memory = Memory()
    async with nixl(launch, memory) as fleet:
        for _ in range(2):
            await ask(fleet, request(image()))

        assert len(fleet.e.calls) == 2


async def test_an_evicted_entry_is_encoded_again_and_the_media_are_sent(launch: Launch) -> None:
    memory = Memory()
    async with nixl(launch, memory) as fleet:

        async def evicts(*call: Any) -> Any:
            reply = await memory.encodes(5601)(*call)
            if len(fleet.e.calls) == 1:
                memory.held.clear()
            return reply

        fleet.e.chat = evicts
        await ask(fleet, request(image()))

        assert [kinds(fleet.d, call) for call in (0, 1)] == [["image_embeds"], ["image_url"]]
        assert len(memory.read) == 1


async def test_media_go_along_where_an_output_has_no_whole_address(launch: Launch) -> None:
    memory = Memory(silent="peer_host")
    async with nixl(launch, memory) as fleet:
        await ask(fleet, request(image()))

        assert kinds(fleet.d) == ["image_url"]


async def test_an_output_without_room_in_the_store_is_sent_as_media(launch: Launch) -> None:
    memory = Memory(full=True)
    async with nixl(launch, memory) as fleet:
        await ask(fleet, request(image()))

        assert kinds(fleet.d) == ["image_url"]


async def test_outputs_in_a_shared_folder_are_used_without_a_lookup(launch: Launch) -> None:
    async with launch(ec_transfer="example", prefill=1) as fleet:
        for _ in range(2):
            await ask(fleet, request(image(b"1"), image(b"2")))

        assert len(fleet.e.calls) == 4  # the proxy does not check whether outputs are there
        for call in (*fleet.p.calls, *fleet.d.calls):
            assert [part["type"] for part in call.parts] == ["image_embeds"] * 2
        for call in fleet.p.calls:
            assert set(call.body["ec_transfer_params"]) == {part["uuid"] for part in call.parts}
        fleet.e.chat = refuses(500)
        await ask(fleet, request(image(b"1")))
        assert kinds(fleet.d) == ["image_url"]
