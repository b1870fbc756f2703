"""Requests go where their prompts are cached. On real sockets."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.requests import image, request, text
from tests.support.fake_instance import FakeInstance
from tests.support.fleet import Fleet, Launch
from tests.support.registration import ADMIN, KEY

SYSTEM = {"role": "system", "content": "Be brief. " * 800}
METADATA_TOKENS = 1 * 36 * 54 // 4
"""What the fake encode instance reports of a picture."""


def ask(picture: bytes, question: str, **more: Any) -> dict[str, Any]:
    body = request(image(picture), text(question), **more)
    return {**body, "messages": [SYSTEM, *body["messages"]]}


async def served(
    fleet: Fleet, of: Sequence[FakeInstance], body: dict[str, Any], **headers: str
) -> str:
    """URL of the one of these instances that has served a request."""
    before = [len(one.calls) for one in of]
    status, answer = await fleet.chat(body, headers)
    assert status == 200, answer
    [found] = [one for one, calls in zip(of, before, strict=True) if len(one.calls) > calls]
    return found.url


async def test_questions_about_one_picture_go_to_one_instance(launch: Launch) -> None:
    async with launch(decode=4, decode_balance="content") as fleet:
        homes = {}
        for number in range(12):
            picture = image(b"picture %d" % number)
            homes[number] = await served(fleet, fleet.decode, request(picture, text("first")))
        for number, home in homes.items():
            body = request(image(b"picture %d" % number), text("second"))
            assert await served(fleet, fleet.decode, body) == home

        assert len({*homes.values()}) > 1


async def test_prefill_and_decode_are_chosen_by_content(launch: Launch) -> None:
    both: dict[str, Any] = {"prefill_balance": "content", "decode_balance": "content"}
    async with launch(prefill=3, decode=3, **both) as fleet:
        for number in range(6):
            ways = set()
            for question in ("first", "second"):
                before = [len(one.calls) for one in fleet.instances[1:]]
                assert (await fleet.chat(ask(b"picture %d" % number, question)))[0] == 200
                after = [len(one.calls) for one in fleet.instances[1:]]
                ways.add(tuple(now - had for now, had in zip(after, before, strict=True)))
            assert len(ways) == 1


async def test_matched_tokens_are_in_the_metrics_the_record_and_the_page(launch: Launch) -> None:
    async with launch(decode=2, decode_balance="content", admin_api_key=KEY) as fleet:
        for question in ("first", "second"):
            await served(fleet, fleet.decode, ask(b"picture", question))
        async with fleet.http.get(f"{fleet.url}/metrics", headers=ADMIN) as reply:
            lines = (await reply.text()).splitlines()
        async with fleet.http.get(f"{fleet.url}/ui/state", headers=ADMIN) as reply:
            shown = (await reply.json())["instances"]

        first, second = (one.prefix_tokens for one in fleet.events.requests[:2])
        assert first == 0
        assert second is not None
        assert second == pytest.approx(8000 // 4 + METADATA_TOKENS, abs=20)
        counts = [
            sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}_total{{"))
            for name in ("epd_prefix_tokens_matched", "epd_prefix_tokens")
        ]
        assert counts == [second, pytest.approx(2 * second, abs=20)]
        assert sum(one["prefix_tokens"] for one in shown) == second
        assert sum(one["prompt_tokens"] for one in shown) == counts[1]


async def test_prefix_tokens_are_not_counted_without_the_content_balance(launch: Launch) -> None:
    async with launch(decode=2, admin_api_key=KEY) as fleet:
        await served(fleet, fleet.decode, ask(b"picture", "first"))
        async with fleet.http.get(f"{fleet.url}/metrics", headers=ADMIN) as reply:
            assert "epd_prefix_tokens_total{" not in await reply.text()

        assert fleet.events.requests[0].prefix_tokens is None


async def test_requests_of_a_session_have_one_home(launch: Launch) -> None:
    async with launch(decode=3, decode_balance="content") as fleet:
        bodies = [request(text(f"{number} " * 2000)) for number in range(6)]
        homes = [
            await served(fleet, fleet.decode, body, **{"X-Session-Id": "s"}) for body in bodies
        ]
        again = [await served(fleet, fleet.decode, body) for body in bodies]

        assert {*homes, *again} == {homes[0]}
