"""Row 71: answers that take minutes, and streams with long silences."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

import epd
from epd.errors import Outcome, UpstreamTimeout
from tests.requests import request, text
from tests.support.fake_instance import Handler, chunk, decodes, hangs, prefills, streams_then
from tests.support.fleet import Launch

pytestmark = pytest.mark.fault(71)


def later(delay_s: float, then: Handler) -> Handler:
    async def chat(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(delay_s)
        return await then(request, body)

    return chat


async def test_an_answer_without_a_stream_outlasts_the_first_byte_timeout(launch: Launch) -> None:
    async with launch(first_byte_timeout_s=0.2) as fleet:
        fleet.d.chat = later(1.0, decodes)
        assert (await fleet.chat(request(text())))[0] == 200
        async with fleet.post(request(text(), stream=True)) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (504, "decode_timeout")


async def test_late_decodes_are_not_ejected(launch: Launch) -> None:
    """Neither missing heads nor silent streams eject a decode instance."""
    limits: tuple[tuple[Handler, str, Any], ...] = (
        (hangs, "decode_timeout", {"first_byte_timeout_s": 0.2}),
        (streams_then(chunk("a"), then=hangs), "decode_stalled", {"idle_timeout_s": 0.2}),
    )
    for fault, slug, limit in limits:
        async with launch(decode=2, eject_after=1, **limit) as fleet:
            for instance in fleet.decode:
                instance.chat = fault
            for _ in range(4):
                async with fleet.post(request(text(), stream=True)) as reply:
                    await reply.read()

            assert {one.error for one in fleet.events.requests} == {slug}
            assert fleet.events.changes == []


async def test_a_queue_at_prefill_ejects_nothing(launch: Launch) -> None:
    async with launch(prefill=2, prefill_timeout_s=0.2, eject_after=1) as fleet:
        for instance in fleet.prefill:
            instance.chat = later(60, prefills)
        for _ in range(3):
            assert (await fleet.chat(request(text())))[0] == 200  # decode prefills

        assert fleet.events.changes == []


@pytest.mark.parametrize(
    ("stage", "outcome"),
    [("encode", Outcome.BAD), ("prefill", Outcome.LATE), ("decode", Outcome.LATE)],
)
def test_a_late_answer_is_a_failure_only_for_encode(stage: Any, outcome: Outcome) -> None:
    assert UpstreamTimeout("late", stage=stage).outcome is outcome


def test_a_stream_may_be_silent_for_ten_minutes() -> None:
    config = epd.ProxyConfig(
        encode_servers_urls=("http://e:1",), decode_servers_urls=("http://d:1",)
    )

    assert config.idle_timeout_s == 600
