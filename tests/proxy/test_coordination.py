"""Coordination policies on real sockets: which encode, prefill and decode instances are used."""

import asyncio
from typing import Any

import pytest

from tests.requests import image, request, text
from tests.support.fake_instance import (
    FakeInstance,
    after,
    decodes,
    drops,
    hangs,
    refuses,
)
from tests.support.fleet import Fleet, Launch, until

HEADER = "x-decoder-host-port"
STRANGERS = {"decode_hosts": "127.0.0.0/8"}
POLICIES = ("encode_prefill_decode", "prefill_decode", "prefill_local_decode_remote")
each_policy = pytest.mark.parametrize("policy", POLICIES)


def asked(fleet: Fleet) -> tuple[int, int, int]:
    """Return how many requests the encode, prefill and decode instances have received."""
    groups = (fleet.encode, fleet.prefill, fleet.decode)
    encode, prefill, decode = (sum(len(one.calls) for one in group) for group in groups)
    return encode, prefill, decode


def place(instance: FakeInstance) -> str:
    return instance.url.removeprefix("http://")


async def answered(fleet: Fleet, body: dict[str, Any], **headers: str) -> int:
    async with fleet.post(body, {name.replace("_", "-"): one for name, one in headers.items()}) as (
        reply
    ):
        await reply.read()
        return reply.status


async def test_media_without_an_encode_stage_keep_the_keys_of_the_proxy(launch: Launch) -> None:
    async with launch(1, 1, 1, policies=("prefill_decode",)) as fleet:
        assert await answered(fleet, request(image(uuid="mine"))) == 200
        [part] = fleet.p.calls[0].parts

    assert part["image_url"] == image()["image_url"]
    assert part["uuid"] != "mine"


async def test_short_prompts_are_not_prefilled_separately(launch: Launch) -> None:
    async with launch(1, 1, 1, skip_prefill_below_tokens=20) as fleet:
        assert await answered(fleet, request(text("a" * 60))) == 200
        assert asked(fleet) == (0, 0, 1)
        assert "kv_transfer_params" not in fleet.d.calls[0].body

        assert await answered(fleet, request(text("a" * 200))) == 200
        assert asked(fleet) == (0, 1, 2)

        assert await answered(fleet, request(image())) == 200
        assert asked(fleet) == (1, 2, 3)


async def test_an_early_choice_counts_as_load_from_the_choice_on(launch: Launch) -> None:
    goes_on = asyncio.Event()

    async with (
        launch(1, 1, 2, kv_transfer="lmcache") as fleet,
        asyncio.TaskGroup() as group,
    ):
        for one in fleet.decode:
            one.chat = after(goes_on, one.chat)
        group.create_task(answered(fleet, request(text())))
        await until(lambda: asked(fleet)[2] == 1)
        fleet.p.chat = after(goes_on, fleet.p.chat)
        for _ in range(4):
            group.create_task(answered(fleet, request(text())))
        await until(lambda: asked(fleet)[1] == 5)
        goes_on.set()
        await until(lambda: asked(fleet)[2] == 5)

        assert sorted(len(one.calls) for one in fleet.decode) == [2, 3]


async def test_requests_that_prefill_cannot_serve_go_to_a_remote_decode_with_their_media(
    launch: Launch,
) -> None:
    stranger = FakeInstance(decodes)
    named = {"policies": ("prefill_local_decode_remote",), "decode_from": "header", **STRANGERS}
    async with stranger.running(), launch(1, 1, 0, **named) as fleet:
        body = request(text(), image(), n=2)
        assert await answered(fleet, body, **{HEADER: place(stranger)}) == 200

        assert asked(fleet) == (0, 0, 0)
        assert [part["type"] for part in stranger.calls[0].parts] == ["text", "image_url"]


async def test_decode_serves_requests_that_the_local_instance_cannot_prefill(
    launch: Launch,
) -> None:
    async with launch(1, 2, 1, policies=("prefill_local_decode_remote",)) as fleet:
        fleet.p.chat = refuses(500)

        async with fleet.post(request(image())) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-degraded"] == "prefill-local"
        assert len(fleet.prefill[1].calls) == 0


@each_policy
async def test_the_client_names_a_decode_instance_of_the_table(launch: Launch, policy: str) -> None:
    named = {"policies": (policy,), "decode_from": "header"}
    async with launch(1, 1, 3, **named) as fleet:
        for _ in range(4):
            headers = {HEADER: place(fleet.decode[1])}
            assert await answered(fleet, request(text()), **headers) == 200

        assert [len(one.calls) for one in fleet.decode] == [0, 4, 0]


async def test_the_client_names_one_on_an_allowed_host(launch: Launch) -> None:
    stranger = FakeInstance(decodes)
    async with stranger.running():
        named: dict[str, Any] = {"decode_from": "header", **STRANGERS}
        async with launch(1, 1, 1, **named) as fleet:
            assert await answered(fleet, request(text()), **{HEADER: place(stranger)}) == 200
            assert await answered(fleet, request(text()), **{HEADER: stranger.url}) == 200
            assert asked(fleet) == (0, 2, 0)
            assert len(stranger.calls) == 2
            assert "kv_transfer_params" in stranger.calls[0].body

            assert await answered(fleet, request(text())) == 200
            assert asked(fleet) == (0, 3, 1)


@pytest.mark.parametrize("decode_hosts", ["", "10.0.0.0/8", "localhost", "*.0.1"])
@pytest.mark.parametrize(
    ("value", "status", "slug"),
    [
        ("{stranger}", 403, "host_not_allowed"),
        ("http://{stranger}", 403, "host_not_allowed"),
        ("{prefill}", 403, "host_not_allowed"),
        ("{decode}/v1", 403, "host_not_allowed"),
        ("[::ffff:127.0.0.1]:80", 403, "host_not_allowed"),
        ("2130706433:80", 403, "host_not_allowed"),
        ("10.0.0.1@{stranger}", 400, "invalid_decode"),
        ("10.0.0.1:80@{stranger}", 400, "invalid_decode"),
        ("file:///etc/passwd", 400, "invalid_decode"),
        ("gopher://{stranger}", 400, "invalid_decode"),
        ("{stranger}?x", 400, "invalid_decode"),
        ("{stranger}#.svc", 400, "invalid_decode"),
        ("a b:1", 400, "invalid_decode"),
        ("nonsense", 400, "invalid_decode"),
        ("host:", 400, "invalid_decode"),
        ("host:0", 400, "invalid_decode"),
        ("host:99999", 400, "invalid_decode"),
        ("host/path:80", 400, "invalid_decode"),
        ("http://host", 403, "host_not_allowed"),
        ("", 400, "invalid_decode"),
    ],
)
async def test_an_instance_that_a_client_may_not_name_gets_no_request(
    launch: Launch, value: str, status: int, slug: str, decode_hosts: str
) -> None:
    stranger = FakeInstance(decodes)
    async with (
        stranger.running(),
        launch(1, 1, 1, decode_from="header", decode_hosts=decode_hosts) as fleet,
    ):
        places = {"stranger": place(stranger), "prefill": place(fleet.p), "decode": place(fleet.d)}
        async with fleet.post(request(image()), {HEADER: value.format(**places)}) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (status, slug)
            assert HEADER in (await reply.json())["error"]["message"]
        assert asked(fleet) == (0, 0, 0)
        assert not stranger.calls
        assert not stranger.other_calls


FORBIDDEN, MALFORMED = (403, "host_not_allowed"), (400, "invalid_decode")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("{stranger}/v1", FORBIDDEN),
        ("http://{stranger}/x/..", FORBIDDEN),
        ("{stranger}/\xff", FORBIDDEN),
        ("a\\.0.1:80", MALFORMED),
        ("a%2f.0.1:80", FORBIDDEN),
    ],
)
async def test_a_client_names_only_host_and_port_of_an_instance_on_an_allowed_host(
    launch: Launch, value: str, expected: tuple[int, str]
) -> None:
    stranger = FakeInstance(decodes)
    hosts = "127.0.0.0/8,*.0.1"
    async with (
        stranger.running(),
        launch(1, 1, 1, decode_from="header", decode_hosts=hosts) as fleet,
    ):
        headers = {HEADER: value.format(stranger=place(stranger))}
        async with fleet.post(request(text()), headers) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == expected
        assert asked(fleet) == (0, 0, 0)
        assert not stranger.calls
        assert not stranger.other_calls


async def test_the_header_means_nothing_unless_it_is_asked_for(launch: Launch) -> None:
    async with launch(1, 1, 2, **STRANGERS) as fleet:
        for _ in range(2):
            assert await answered(fleet, request(text()), **{HEADER: place(fleet.d)}) == 200

        assert [len(one.calls) for one in fleet.decode] == [1, 1]


async def test_the_header_name_is_configurable(launch: Launch) -> None:
    async with launch(1, 1, 2, decode_from="header", decode_header="X-Decoder") as fleet:
        for _ in range(2):
            assert await answered(fleet, request(text()), x_decoder=place(fleet.d)) == 200

        assert [len(one.calls) for one in fleet.decode] == [2, 0]


async def test_an_instance_named_by_the_client_is_retried_and_no_other(launch: Launch) -> None:
    async with launch(1, 1, 2, decode_from="header") as fleet:
        fleet.d.chat = drops

        assert await answered(fleet, request(text()), **{HEADER: place(fleet.d)}) == 502
        assert len([call for call in fleet.d.calls if call.body.get("max_tokens") != 1]) == 2
        assert fleet.decode[1].calls == []  # the request might kill it too


async def test_blocks_are_released_by_another_instance_if_the_named_one_fails(
    launch: Launch,
) -> None:
    async with launch(1, 1, 2, decode_from="header") as fleet:
        fleet.d.chat = refuses(503)

        assert await answered(fleet, request(image()), **{HEADER: place(fleet.d)}) == 503
        await until(lambda: fleet.decode[1].calls)
        [told] = [call.body for call in fleet.decode[1].calls]
        assert told["max_tokens"] == 1
        assert "ec_transfer_params" not in told
        assert told["kv_transfer_params"]["remote_block_ids"]


async def test_a_request_names_the_decode_instance_if_the_proxy_has_none(launch: Launch) -> None:
    async with launch(1, 1, 0, decode_from="header", **STRANGERS) as fleet:
        status, said = await fleet.chat(request(text()))

    assert status == 400
    assert f"name one in the header {HEADER}: host:port" in said["error"]["message"]


async def test_a_request_that_no_policy_speaks_of_is_refused(launch: Launch) -> None:
    async with launch(1, 1, 1, policies=("pd_only",), skip_prefill_for_text=True) as fleet:
        async with fleet.post(request(image())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (503, "no_policy")
        fleet.d.chat = hangs
