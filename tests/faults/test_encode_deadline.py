"""The encode stage as a whole: its deadline, its retries, and items that it leaves to the consumer.

Rows 4, 7 and 78.
"""

import asyncio
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from epd.request.encode import AT_ONCE, Encoder
from epd.request.encode_job import MAX_RETRIES
from epd.routing.retries import Retries
from epd.server import app as proxy_app
from epd.upstream import Upstream, WholeReply
from tests.faults.test_encode import busy, encoded
from tests.requests import image, png, request
from tests.support.fake_instance import Handler, after, drops, encodes, hangs, refuses
from tests.support.fleet import Launch, until

ITEMS = 64


def pictures(count: int = ITEMS) -> dict[str, Any]:
    return request(*(image(b"%d" % number) for number in range(count)))


@pytest.mark.fault(7)
@pytest.mark.parametrize("failure", ["local", "fail"])
async def test_one_deadline_covers_all_items_and_their_tries(launch: Launch, failure: str) -> None:
    config: Any = {"encode_timeout_s": 1.0, "on_encode_failure": failure}
    async with launch(encode=2, **config) as fleet:
        for instance in fleet.encode:
            instance.chat = hangs
        async with fleet.post(pictures()) as reply:
            status = reply.status

        assert status == (200 if failure == "local" else 504)
        [done] = fleet.events.requests
        assert done.error == (None if failure == "local" else "encode_timeout")
        # The items of the first wave use up the time: those behind them are not sent.
        assert AT_ONCE <= encoded(*fleet.encode) <= 2 * AT_ONCE + MAX_RETRIES
        ends = [one.started_s + one.seconds for one in fleet.events.stages if one.stage == "encode"]
        starts = [one.started_s for one in fleet.events.stages if one.stage == "encode"]
        assert max(starts) - min(starts) < config["encode_timeout_s"]
        assert len(ends) == encoded(*fleet.encode)


@pytest.mark.parametrize(("encode", "first_s"), [(1, 60), (2, 30)])
async def test_first_try_has_time_for_a_long_video_by_default(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, encode: int, first_s: float
) -> None:
    limits_s, fetch = list[float](), Upstream.fetch

    async def fetch_limited(client: Upstream, url: str, **more: Any) -> WholeReply:
        if more["stage"] == "encode":
            limits_s.append(more["timeout_s"])
        return await fetch(client, url, **more)

    monkeypatch.setattr(Upstream, "fetch", fetch_limited)
    async with launch(encode=encode) as fleet:
        assert (await fleet.chat(pictures(1)))[0] == 200

    [limit_s] = limits_s
    assert 0.8 * first_s < limit_s <= first_s


@pytest.mark.fault(4)
@pytest.mark.parametrize("fault", [busy(None), refuses(500)])
async def test_retries_of_a_requests_items_are_bounded(launch: Launch, fault: Handler) -> None:
    async with launch(encode=3, encode_balance="round_robin") as fleet:
        for instance in fleet.encode:
            instance.chat = fault
        assert (await fleet.chat(pictures()))[0] == 200

        assert encoded(*fleet.encode) <= ITEMS + MAX_RETRIES


async def test_an_item_with_a_fallback_does_not_wait_for_the_retry_budget(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With places for no retry, a wait would last for the whole patience."""
    no_place = Retries(least=0, share=0.0)
    monkeypatch.setattr(proxy_app, "Encoder", partial(Encoder, _retries=no_place))
    async with launch(encode=2, encode_timeout_s=600, on_encode_failure="local") as fleet:
        for instance in fleet.encode:
            instance.chat = refuses(500)
        async with asyncio.timeout(20), fleet.post(pictures(4)) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-items"] == "hit=0,encoded=0,local=4"

        assert encoded(*fleet.encode) == 4


async def test_one_death_leaves_enough_retries_for_all_items(launch: Launch) -> None:
    """Without a fallback, the items at an instance that dies are sent to another one."""
    config: Any = {"on_encode_failure": "fail", "encode_balance": "round_robin"}
    async with launch(encode=2, decode=1, **config) as fleet:

        async def dies(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await fleet.e.stop_listening()
            return await drops(http, body)

        fleet.e.chat = dies
        assert (await fleet.chat(pictures()))[0] == 200


@pytest.mark.fault(78)
@pytest.mark.parametrize("failure", ["local", "fail"])
async def test_items_behind_a_long_queue_are_left_to_the_consumer(
    launch: Launch, failure: str
) -> None:
    gate = asyncio.Event()

    async def slow(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return await encodes(http, body)

    def is_placed(asked: asyncio.Task[Any], sent: int) -> bool:
        return asked.done() or encoded(fleet.e) == sent

    config: Any = {"on_encode_failure": failure, "encode_timeout_s": 10.0}
    async with launch(**config) as fleet:
        fleet.e.chat = slow
        for number in range(3):  # its speed becomes known
            await fleet.chat(request(image(b"warm %d" % number)))
        fleet.e.chat = after(gate, encodes)
        waiting = list[asyncio.Task[tuple[int, dict[str, Any]]]]()
        for number in range(30):
            asked = asyncio.create_task(fleet.chat(request(image(b"queued %d" % number))))
            waiting.append(asked)
            await until(partial(is_placed, asked, number + 4))
            if asked.done():
                break
        left = [one for one in fleet.events.requests if one.degraded]
        gate.set()
        assert {status for status, _ in await asyncio.gather(*waiting)} == {200}

        assert [one.placements for one in left] == [{("local", "overloaded"): 1}] * (
            failure == "local"
        )
        assert (len(waiting) < 30) is (failure == "local")


async def test_a_photo_after_many_icons_is_encoded_by_an_idle_instance(launch: Launch) -> None:
    """An encode takes 30 ms, and 1 s for 40 megapixels: icons teach a longer time of each pixel."""
    sides = (*range(32, 64), 4000)
    async with launch() as fleet:
        for side in sides:
            fleet.e.chat = partial(after_s, 0.03 + side * side / 40e6)
            assert (await fleet.chat(request(image(png(side, side)))))[0] == 200

        assert encoded(fleet.e) == len(sides)
        assert not any(one.degraded for one in fleet.events.requests)


async def test_icons_are_encoded_while_a_photo_is(launch: Launch) -> None:
    gate = asyncio.Event()
    async with launch() as fleet:
        fleet.e.chat = partial(after_s, 0.03)
        for side in range(32, 40):
            await fleet.chat(request(image(png(side, side))))
        fleet.e.chat = after(gate, encodes)
        photo = asyncio.create_task(fleet.chat(request(image(png(4000, 3000)))))
        await until(lambda: encoded(fleet.e) == 9)
        fleet.e.chat = encodes
        assert (await fleet.chat(request(image(png(50, 50)))))[0] == 200
        gate.set()
        assert (await photo)[0] == 200

        assert encoded(fleet.e) == 10
        assert not any(one.degraded for one in fleet.events.requests)


async def after_s(seconds: float, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Encode, and answer after some seconds."""
    await asyncio.sleep(seconds)
    return await encodes(http, body)
