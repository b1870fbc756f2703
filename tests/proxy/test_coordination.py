"""Coordination policies on real sockets: which encode, prefill and decode instances are used."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from epd.server.app_keys import TABLE
from tests.requests import image, request, text
from tests.support.fake_instance import (
    FakeInstance,
    after,
    decodes,
    drops,
    hangs,
    prefills,
    refuses,
)
from tests.support.fleet import Fleet, Launch, until
from tests.support.picker import STRANGERS, Picker, asked, picked_by

HEADER = "x-decoder-host-port"
POLICIES = ("encode_prefill_decode", "prefill_decode", "prefill_local_decode_remote")
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_choice = pytest.mark.parametrize("choice", ["early", "late"])


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
        launch(1, 1, 2, decode_choice="early") as fleet,
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
@each_choice
async def test_the_client_names_a_decode_instance_of_the_table(
    launch: Launch, policy: str, choice: str
) -> None:
    named = {"policies": (policy,), "decode_choice": choice, "decode_from": "header"}
    async with launch(1, 1, 3, **named) as fleet:
        for _ in range(4):
            headers = {HEADER: place(fleet.decode[1])}
            assert await answered(fleet, request(text()), **headers) == 200

        assert [len(one.calls) for one in fleet.decode] == [0, 4, 0]


@each_choice
async def test_the_client_names_one_on_an_allowed_host(launch: Launch, choice: str) -> None:
    stranger = FakeInstance(decodes)
    async with stranger.running():
        named = {"decode_choice": choice, "decode_from": "header", **STRANGERS}
        async with launch(1, 1, 1, **named) as fleet:
            assert await answered(fleet, request(text()), **{HEADER: place(stranger)}) == 200
            assert await answered(fleet, request(text()), **{HEADER: stranger.url}) == 200
            assert asked(fleet) == (0, 2, 0)
            assert len(stranger.calls) == 2
            assert "kv_transfer_params" in stranger.calls[0].body

            assert await answered(fleet, request(text())) == 200
            assert asked(fleet) == (0, 3, 1)


FORBIDDEN, MALFORMED = (403, "host_not_allowed"), (400, "invalid_decode")
ELSEWHERE = {
    "{stranger}": FORBIDDEN,
    "http://{stranger}": FORBIDDEN,
    "{prefill}": FORBIDDEN,
    "{decode}/v1": FORBIDDEN,
    "[::ffff:127.0.0.1]:80": FORBIDDEN,
    "2130706433:80": FORBIDDEN,
    "http://host": FORBIDDEN,
    "10.0.0.1@{stranger}": MALFORMED,
    "10.0.0.1:80@{stranger}": MALFORMED,
    "file:///etc/passwd": MALFORMED,
    "gopher://{stranger}": MALFORMED,
    "{stranger}?x": MALFORMED,
    "{stranger}#.svc": MALFORMED,
    "a b:1": MALFORMED,
    "nonsense": MALFORMED,
    "host:": MALFORMED,
    "host:0": MALFORMED,
    "host:99999": MALFORMED,
    "host/path:80": MALFORMED,
    "": MALFORMED,
}
ON_AN_ALLOWED_HOST = {
    "{stranger}/v1": FORBIDDEN,
    "http://{stranger}/x/..": FORBIDDEN,
    "{stranger}/\xff": FORBIDDEN,
    "a\\.0.1:80": MALFORMED,
    "a%2f.0.1:80": FORBIDDEN,
}


@pytest.mark.parametrize(
    ("decode_hosts", "refused"),
    [
        *((hosts, ELSEWHERE) for hosts in ("", "10.0.0.0/8", "localhost", "*.0.1")),
        ("127.0.0.0/8,*.0.1", ON_AN_ALLOWED_HOST),
    ],
)
async def test_an_instance_that_a_client_may_not_name_gets_no_request(
    launch: Launch, decode_hosts: str, refused: dict[str, tuple[int, str]]
) -> None:
    stranger = FakeInstance(decodes)
    async with (
        stranger.running(),
        launch(1, 1, 1, decode_from="header", decode_hosts=decode_hosts) as fleet,
    ):
        places = {"stranger": place(stranger), "prefill": place(fleet.p), "decode": place(fleet.d)}
        for value, expected in refused.items():
            async with fleet.post(request(image()), {HEADER: value.format(**places)}) as reply:
                assert (reply.status, reply.headers["x-epd-error"]) == expected, value
                assert HEADER in (await reply.json())["error"]["message"]
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


@each_policy
@each_choice
async def test_the_picker_names_the_decode_instance(
    launch: Launch, policy: str, choice: str
) -> None:
    async with Picker().running() as picker:
        picked = picked_by(picker)
        async with launch(1, 1, 3, policies=(policy,), decode_choice=choice, **picked) as fleet:

            async def prefills_now(one: web.Request, body: dict[str, Any]) -> web.Response:
                picker.order.append("prefill")
                return await prefills(one, body)

            fleet.p.chat, picker.answer = prefills_now, {"url": fleet.decode[2].url}
            body = request(text("a" * 36))
            headers = {"Authorization": "Bearer key"}
            assert await answered(fleet, body, **headers) == 200
            assert [len(one.calls) for one in fleet.decode] == [0, 0, 1]
            [question] = picker.questions

    assert picker.order == (["picker", "prefill"] if choice == "early" else ["prefill", "picker"])
    assert question.pop("request_id") == picker.headers[0]["x-request-id"]
    assert question == {
        "model": "m",
        "endpoint": "/v1/chat/completions",
        "prompt_tokens": 10,
        "items": 0,
        "prefill": fleet.p.url,
        "candidates": [one.url for one in fleet.decode],
        "tried": [],
    }
    assert "authorization" not in picker.headers[0]


BAD = {
    "refuses": Picker({"url": "http://d:1"}, 500),
    "is no JSON": Picker(b"<html>"),
    "has no url": Picker({"host": "d"}),
    "is no object": Picker([]),
    "is no URL": Picker({"url": "file:///x"}),
    "is not allowed": Picker({"url": "http://10.0.0.1:1"}),
    "is late": Picker({}, delay_s=1),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("decode", [0, 1], ids=["no list", "a list"])
async def test_a_failing_picker_is_replaced_by_the_table_or_fails_the_request(
    launch: Launch, what: str, decode: int
) -> None:
    bad = BAD[what]
    async with (
        Picker(bad.answer, bad.status, bad.delay_s).running() as picker,
        launch(
            *(1, 1, decode),
            decode_from="picker",
            decode_picker_url=picker.url,
            decode_picker_timeout_s=0.3 if bad.delay_s else 30,
            decode_hosts="10.0.0.2",
        ) as fleet,
    ):
        status, said = await fleet.chat(request(text()))

    assert picker.questions or bad.delay_s
    if decode:
        assert status == 200
    else:
        assert status == 503
        assert "endpoint picker names no decode instance" in said["error"]["message"]


@each_choice
async def test_the_picker_may_know_instances_that_the_table_does_not(
    launch: Launch, choice: str
) -> None:
    stranger = FakeInstance(decodes)
    async with stranger.running(), Picker({"url": stranger.url}).running() as picker:
        picked = picked_by(picker) | STRANGERS
        async with launch(1, 1, 0, decode_choice=choice, **picked) as fleet:
            async with fleet.http.get(f"{fleet.url}/ready") as ready:
                assert ready.status == 200
            assert await answered(fleet, request(image())) == 200
            assert len(stranger.calls) == 1


@pytest.mark.parametrize(
    ("delay_s", "reason"),
    [
        (1, "the endpoint picker did not answer in time"),
        (0, "the endpoint picker's answer was cut off"),
    ],
)
async def test_a_picker_that_fails_is_not_taken_for_a_decode_instance(
    launch: Launch, delay_s: float, reason: str
) -> None:
    async with Picker(b"x" * 17 * 1024**2, delay_s=delay_s).running() as picker:
        picked = picked_by(picker) | {"decode_picker_timeout_s": 0.3 if delay_s else 30}
        with capture_logs() as lines:
            async with launch(1, 1, 1, **picked) as fleet:
                assert await answered(fleet, request(text())) == 200

    [line] = [one for one in lines if one["event"].startswith("the endpoint picker cannot be")]
    assert line["reason"].startswith(reason)


async def test_an_unreachable_picker_is_not_reported_as_a_decode_failure(launch: Launch) -> None:
    async with Picker().running() as picker:
        pass
    with capture_logs() as lines:
        async with launch(1, 1, 1, **picked_by(picker)) as fleet:
            assert await answered(fleet, request(text())) == 200

    [line] = [one for one in lines if one["event"].startswith("the endpoint picker cannot be")]
    assert line["reason"] == "the endpoint picker is unreachable"


async def test_the_picker_gets_the_failed_instances(launch: Launch) -> None:
    async with (
        Picker().running() as picker,
        launch(1, 1, 2, **picked_by(picker)) as fleet,
    ):
        picker.answer, fleet.d.chat = {"url": fleet.d.url}, drops

        assert await answered(fleet, request(text())) == 200
        assert len(fleet.decode[1].calls) >= 1

    first, second = picker.questions
    assert (first["tried"], second["tried"]) == ([], [fleet.d.url])


async def test_a_client_that_leaves_while_the_picker_thinks_leaves_nothing(launch: Launch) -> None:
    async with Picker({}, delay_s=0.5).running() as picker:
        picked = picked_by(picker)
        async with launch(1, 1, 1, **picked) as fleet:
            asking = asyncio.create_task(fleet.chat(request(text())))
            while not picker.questions:  # noqa: ASYNC110 - the picker sets no event
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait([asking])
            table = fleet.runner.app[TABLE]
            await until(lambda: fleet.events.requests and table.under_way == {})
            await until(lambda: fleet.d.calls)

            assert asked(fleet) == (0, 1, 1)
            assert fleet.d.calls[0].body["max_tokens"] == 1  # the release of prefill's blocks


async def test_the_picker_is_asked_for_a_decode_instance_if_none_is_named(launch: Launch) -> None:
    async with launch(1, 1, 0, decode_from="header", **STRANGERS) as fleet:
        status, said = await fleet.chat(request(text()))

    assert status == 400
    assert f"name one in the header {HEADER}: host:port" in said["error"]["message"]


async def test_a_request_that_no_policy_speaks_of_is_refused(launch: Launch) -> None:
    async with launch(1, 1, 1, policies=("pd_only",), skip_prefill_for_text=True) as fleet:
        async with fleet.post(request(image())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (503, "no_policy")
        fleet.d.chat = hangs
