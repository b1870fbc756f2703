"""Answers of 500: by a request that fails everywhere, and by an instance that fails always."""

import asyncio
import secrets
from typing import Any

import pytest
from aiohttp import web

from tests.requests import image, request, text
from tests.support.fake_instance import FakeInstance, Handler, decodes, refuses
from tests.support.fleet import Fleet, Launch

BAD = "divide by zero"


def fails_at(words: str, then: Handler) -> Handler:
    """Return an instance that answers 500 to requests with these words."""

    async def chat(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (refuses(500, BAD) if words in str(body) else then)(http, body)

    return chat


def every(instances: list[FakeInstance], words: str) -> None:
    for instance in instances:
        instance.chat = fails_at(words, instance.chat)


def sent(fleet: Fleet) -> int:
    return sum(len(instance.calls) for instance in fleet.instances)


async def prove(fleet: Fleet, *parts: dict[str, Any]) -> None:
    """Have each instance answer some requests, with new pictures in place of these."""
    for number in range(4):
        new = [image(secrets.token_bytes(8)) for _ in parts]
        status, _ = await fleet.chat(request(text(f"good {number}"), *new))
        assert status == 200
    asked = (*fleet.encode, *fleet.prefill, *fleet.decode) if parts else fleet.decode
    assert all(instance.calls for instance in asked)


TURNS: dict[str, Any] = {
    "encode_balance": "round_robin",
    "prefill_balance": "round_robin",
    "decode_balance": "round_robin",
}


@pytest.mark.fault(1)
async def test_item_that_fails_on_every_instance_is_sent_twice_and_ejects_none(
    launch: Launch,
) -> None:
    async with launch(encode=4, decode=2, eject_after=1, **TURNS) as fleet:
        every(fleet.encode, "YmFk")  # "bad" in base64
        for number in range(12):
            good = [image(b"%d %d" % (number, part)) for part in range(8)]
            assert (await fleet.chat(request(*good)))[0] == 200
            before = sent(fleet)
            async with fleet.post(request(image(b"bad %d" % number))) as reply:
                assert (reply.status, reply.headers["x-epd-error"]) == (502, "encode_failed")
            assert sent(fleet) == before + 2

        assert fleet.events.changes == []


@pytest.mark.fault(34)
@pytest.mark.parametrize("prefill", [0, 2])
@pytest.mark.parametrize(("parts", "tries"), [((), 2), ((image(),), 3)], ids=["text", "picture"])
async def test_request_that_fails_on_every_instance_is_soon_given_up_and_ejects_none(
    launch: Launch, prefill: int, parts: tuple[dict[str, Any], ...], tries: int
) -> None:
    """A picture is sent a third time: its name may have been at fault."""
    async with launch(prefill=prefill, decode=2, eject_after=1, **TURNS) as fleet:
        every([*fleet.prefill, *fleet.decode], "BAD!")
        for number in range(6):
            await prove(fleet, *parts)
            consumers = fleet.prefill or fleet.decode
            before = sum(len(instance.calls) for instance in (*fleet.prefill, *fleet.decode))
            status, reply = await fleet.chat(request(text(f"BAD! {number}"), *parts))

            # With a picture, the third try is decode's, which prefills it.
            of_prefill = prefill and not parts
            assert status == (502 if of_prefill else 500)
            assert of_prefill or reply["error"]["message"] == BAD
            after = sum(len(instance.calls) for instance in (*fleet.prefill, *fleet.decode))
            assert after == before + tries
            assert all(len(instance.calls) > 0 for instance in consumers)

        assert fleet.events.changes == []


@pytest.mark.fault(1, 34)
@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
async def test_instance_that_answers_500_to_everything_is_ejected_and_fails_no_request(
    launch: Launch, role: str
) -> None:
    # Requests that name no outputs and no blocks, so that missing ones cannot be the cause.
    async with launch(encode=2, prefill=2 * (role == "prefill"), decode=2, **TURNS) as fleet:
        broken: FakeInstance = getattr(fleet, role)[0]
        parts = [image(b"first")] if role == "encode" else []
        await prove(fleet, *parts)
        broken.chat = refuses(500, "bug")
        for number in range(30):
            new = [image(b"%d" % number)] if role == "encode" else []
            assert (await fleet.chat(request(text(f"{number}"), *new)))[0] == 200

        assert [change.state for change in fleet.events.changes] == ["ejected"]
        assert len(broken.calls) < 20


@pytest.mark.fault(99)
@pytest.mark.parametrize(
    ("role", "prefill", "pictures"),
    [("decode", 2, False), ("decode", 0, True), ("prefill", 2, True)],
    ids=["blocks", "entries", "entries of prefill"],
)
async def test_instance_that_answers_500_to_everything_is_ejected_although_state_may_be_lost(
    launch: Launch, role: str, prefill: int, *, pictures: bool
) -> None:
    async with launch(encode=1, prefill=prefill, decode=2, **TURNS) as fleet:
        broken: FakeInstance = getattr(fleet, role)[0]
        await prove(fleet, *([image()] if pictures or prefill else []))
        before = len(broken.calls)
        broken.chat = refuses(500, "bug")
        for number in range(30):
            new = [image(b"%d" % number)] if pictures else []
            assert (await fleet.chat(request(text(f"{number}"), *new)))[0] == 200

        assert [change.state for change in fleet.events.changes] == ["ejected"]
        assert len(broken.calls) - before < 15


@pytest.mark.fault(99)
@pytest.mark.parametrize("proven", [True, False])
async def test_blocks_that_many_requests_lose_at_once_eject_no_decode_instance(
    launch: Launch, proven: bool
) -> None:
    """A prefill instance that restarts loses the blocks of all requests that are on their way."""
    count = 24
    lost, all_wait = set[str](), asyncio.Event()

    async def pulls(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        words = str(body["messages"])
        if "lost" not in words or words in lost:
            return await decodes(http, body)
        lost.add(words)
        if len(lost) == count:
            all_wait.set()
        await all_wait.wait()
        return await refuses(500, BAD)(http, body)

    async with launch(prefill=2, decode=2, eject_after=1, **TURNS) as fleet:
        for instance in fleet.decode:
            instance.chat = pulls
        if proven:
            await prove(fleet, image())
        asked = [fleet.chat(request(text(f"lost {number}"))) for number in range(count)]
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}

        assert len(lost) == count
        assert fleet.events.changes == []


@pytest.mark.fault(1)
async def test_stage_that_answers_500_to_everything_is_replaced_by_the_next_one(
    launch: Launch,
) -> None:
    async with launch(encode=2, prefill=2, **TURNS) as fleet:
        await prove(fleet, image())
        for instance in (*fleet.encode, *fleet.prefill):
            instance.chat = refuses(500, "bug")
        statuses = [
            (await fleet.chat(request(text(), image(b"%d" % number))))[0] for number in range(8)
        ]

        # Only the first request may be at fault: both instances had just answered others.
        assert set(statuses[2:]) == {200}
