"""Rows 30, 34, 36 and 44: prefill and decode run concurrently, and one of them fails."""

import asyncio
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from epd.request.kv_peers import PeerRegistry
from epd.server import app as proxy_app
from tests.requests import image, request, text
from tests.support.fake_instance import (
    Handler,
    after,
    drops,
    fails_first,
    hangs,
    refuses,
    streams_then,
)
from tests.support.fleet import Fleet, Launch, until
from tests.support.strict_instance import strict

AT_ONCE: Any = {"eject_after": 1}
"""Settings that eject an instance after one failure, so that wrong blame becomes visible."""
streaming = pytest.mark.parametrize("stream", [True, False])


async def whole(fleet: Fleet, body: dict[str, Any]) -> tuple[int, bytes]:
    async with fleet.post(body) as reply:
        return reply.status, await reply.read()


@streaming
@pytest.mark.fault(30)
@pytest.mark.parametrize("fault", [refuses(500), refuses(503), drops])
async def test_a_failed_prefill_aborts_decode_and_both_are_retried(
    launch: Launch, fault: Handler, stream: bool
) -> None:
    async with strict(launch, "mooncake", prefill=2, **AT_ONCE) as (fleet, wire):
        began = asyncio.Event()
        right = fleet.d.chat

        async def notes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            began.set()
            return await right(request, body)

        fleet.d.chat = notes
        fleet.prefill[0].chat = fails_first(1, after(began, fault), fleet.prefill[0].chat)
        for _ in range(2):
            async with fleet.post(request(text(), image(), stream=stream)) as reply:
                assert reply.status == 200, await reply.text()
                assert "x-epd-degraded" not in reply.headers
                await reply.read()

        assert wire.fetched == 2
        assert fleet.d.aborted == 1
        assert not [one for one in fleet.events.changes if one.instance == fleet.d.url]


@pytest.mark.fault(30)
async def test_a_failed_prefill_keeps_the_decode_instance_eligible(launch: Launch) -> None:
    balance: Any = {"decode_balance": "session"}
    async with strict(launch, "mooncake", prefill=2, decode=2, **balance) as (fleet, _):
        fleet.p.chat = fails_first(1, refuses(500), fleet.p.chat)
        for _ in range(2):
            async with fleet.post(request(text()), {"x-session-id": "mine"}) as reply:
                assert reply.status == 200, await reply.text()

        assert len(fleet.p.calls) + len(fleet.prefill[1].calls) == 3
        assert sorted(bool(one.calls) for one in fleet.decode) == [False, True]


@pytest.mark.fault(30)
async def test_decode_also_prefills_if_all_prefill_instances_fail(launch: Launch) -> None:
    async with strict(launch, "mooncake", prefill=2) as (fleet, wire):
        for one in fleet.prefill:
            one.chat = refuses(500)
        async with fleet.post(request(text())) as reply:
            # The fake decode instance of this fleet rejects that; vLLM's does not.
            assert (reply.status, fleet.d.calls[-1].body.get("kv_transfer_params")) == (500, None)
        wire.wrong.clear()

        assert [len(one.calls) for one in fleet.prefill] == [1, 1]


@streaming
@pytest.mark.fault(34)
async def test_a_failed_decode_aborts_the_concurrent_prefill(launch: Launch, stream: bool) -> None:
    async with strict(launch, "mooncake", prefill=2, decode=2, **AT_ONCE) as (fleet, wire):
        began = asyncio.Event()

        async def waits(request: web.Request, body: dict[str, Any]) -> web.Response:
            began.set()
            return await hangs(request, body)

        fleet.prefill[0].chat = fails_first(1, waits, fleet.prefill[0].chat)
        fleet.decode[0].chat = fails_first(1, after(began, refuses(503)), fleet.decode[0].chat)
        async with fleet.post(request(text(), stream=stream)) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()

        await until(lambda: fleet.prefill[0].aborted == 1)
        assert wire.fetched == 1
        assert not [one for one in fleet.events.changes if one.instance == fleet.p.url]


@pytest.mark.fault(34)
async def test_blocks_that_decode_did_not_come_for_are_released(launch: Launch) -> None:
    async with strict(launch, "mooncake", prefill=2, decode=2) as (fleet, wire):

        async def refuses_late(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await until(lambda: any(one.stage == "prefill" for one in fleet.events.stages))
            return await refuses(503)(request, body)

        fleet.decode[0].chat = fails_first(1, refuses_late, fleet.decode[0].chat)
        async with fleet.post(request(text())) as reply:
            assert reply.status == 200, await reply.text()

        await until(lambda: wire.fetched == 2)  # the answer, and the release


@pytest.mark.fault(34)
@pytest.mark.parametrize("leaves", [True, False], ids=["client leaves", "decode is silent"])
async def test_decode_that_has_sent_its_head_gets_no_release(launch: Launch, leaves: bool) -> None:
    """An aborted decode tells prefill; a late release could free blocks of another request."""
    silence: Any = {} if leaves else {"idle_timeout_s": 0.3}
    async with launch(prefill=1, decode=2, **silence) as fleet:
        for one in fleet.decode:
            one.chat = streams_then(then=hangs)
        asking = asyncio.ensure_future(whole(fleet, request(text(), stream=True)))
        if leaves:
            await until(lambda: sum(one.open for one in fleet.decode))
            await asyncio.sleep(0.1)  # decode's head has arrived
            asking.cancel()
        else:
            assert (await asking)[0] == 504
        await until(lambda: sum(one.aborted for one in fleet.decode))
        await asyncio.sleep(0.2)  # a release would have been sent by now

        sent = [len(one.calls) for one in fleet.decode]  # another instance is tried after a timeout
        assert sorted(sent) == ([0, 1] if leaves else [1, 1])


async def test_mooncake_request_is_answered_after_both_prefill_and_decode(launch: Launch) -> None:
    async with strict(launch, "mooncake") as (fleet, wire):
        go = asyncio.Event()
        fleet.p.chat = after(go, fleet.p.chat)
        asking = asyncio.ensure_future(whole(fleet, request(text(), stream=True)))
        await until(lambda: fleet.d.open and fleet.p.open)
        await asyncio.sleep(0.1)  # decode's head has arrived
        assert not asking.done()
        go.set()
        status, said = await asking

        assert (status, said.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert wire.fetched == 1


@streaming
@pytest.mark.fault(44)
async def test_a_client_that_leaves_aborts_both(launch: Launch, stream: bool) -> None:
    async with strict(launch, "mooncake") as (fleet, _):
        fleet.p.chat = hangs
        asking = asyncio.ensure_future(fleet.chat(request(text(), stream=stream)))
        await until(lambda: fleet.d.open and fleet.p.open)
        asking.cancel()
        await until(lambda: (fleet.p.aborted, fleet.d.aborted) == (1, 1))


@pytest.mark.fault(36)
async def test_a_request_that_decode_refuses_is_the_clients(launch: Launch) -> None:
    async with strict(launch, "mooncake", prefill=2, decode=2) as (fleet, _):
        for one in fleet.prefill:
            one.chat = hangs
        for one in fleet.decode:
            one.chat = refuses(400, "too long")
        status, said = await fleet.chat(request(text()))

        assert (status, said["error"]["message"]) == (400, "too long")
        await until(lambda: sum(one.aborted for one in fleet.prefill) == 1)


@pytest.mark.fault(30)
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (500, "no"),
        (200, "{}"),
    ],
)
async def test_a_connector_without_an_engine_id_is_skipped(
    launch: Launch, status: int, said: str
) -> None:
    async with strict(launch, "mooncake", prefill=2, **AT_ONCE) as (fleet, wire):
        wire.broken = (status, said)
        for _ in range(4):
            async with fleet.post(request(text())) as reply:
                assert reply.status == 200, await reply.text()
                assert "x-epd-degraded" not in reply.headers

        assert fleet.p.calls == []
        assert wire.queries[0] == 1
        assert [one.state for one in fleet.events.changes] == ["ejected"]


@pytest.mark.fault(30)
async def test_a_failing_engine_is_ejected_although_its_bootstrap_server_answers(
    launch: Launch,
) -> None:
    async with strict(launch, "mooncake", prefill=2, eject_after=3) as (fleet, wire):
        fleet.p.chat = refuses(500)
        for _ in range(12):
            async with fleet.post(request(text())) as reply:
                assert reply.status == 200, await reply.text()

        assert [one.instance for one in fleet.events.changes] == [fleet.p.url]
        assert len(fleet.p.calls) == 3
        assert wire.queries[0] == 3


@pytest.mark.fault(30)
async def test_a_missing_bootstrap_server_fails_a_request_that_needs_it(
    launch: Launch,
) -> None:
    config: Any = {"on_prefill_failure": "fail", "prefill_kv_addrs": ("127.0.0.1:9",)}
    async with strict(launch, "mooncake", **config) as (fleet, _):
        async with fleet.post(request(text())) as reply:
            assert (reply.status, reply.headers["x-epd-stage"]) == (502, "prefill")

        assert fleet.p.calls == fleet.d.calls == []
        assert fleet.events.changes == []  # the instance itself accepts connections


@pytest.mark.fault(30)
async def test_the_engine_id_of_a_replaced_prefill_instance_is_fetched_again(
    launch: Launch,
) -> None:
    async with strict(launch, "mooncake") as (fleet, wire):
        async with fleet.post(request(text())) as reply:
            assert reply.status == 200
        fleet.p.chat = fails_first(1, drops, fleet.p.chat)
        wire.engines[0] = {"0": "engine-0-new"}
        async with fleet.post(request(text())) as reply:
            assert reply.status == 200, await reply.text()

        assert wire.queries == [2]
        wire.wrong.clear()  # decode received the old engine id


async def test_facts_about_a_connector_expire(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_app, "PeerRegistry", partial(PeerRegistry, _ttl_s=0.0))
    async with strict(launch, "mooncake") as (fleet, wire):
        for n in range(3):
            wire.engines[0] = {"0": f"engine-{n}"}
            async with fleet.post(request(text())) as reply:
                assert reply.status == 200

        assert wire.queries == [3]


@pytest.mark.fault(30)
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_push_to_an_instance_that_was_replaced_is_tried_again(
    launch: Launch, ranks: int
) -> None:
    async with strict(launch, "nixl-push", ec_consumer_dp_size=ranks) as (fleet, wire):
        right = fleet.d.chat

        async def waits_for_the_old(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            engine_id = body["kv_transfer_params"]["remote_engine_id"]
            waits = wire.generation not in engine_id
            return await (hangs if waits else right)(request, body)

        for _ in range(ranks):
            async with fleet.post(request(text())) as reply:
                assert reply.status == 200
        fleet.d.chat, wire.generation = waits_for_the_old, "-new"
        for _ in range(2 * ranks):
            async with fleet.post(request(text())) as reply:
                assert reply.status == 200, await reply.text()
                assert "x-epd-degraded" not in reply.headers

        assert wire.fetched == 3 * ranks
        assert fleet.d.aborted == 1
        assert [one.retries for one in fleet.events.requests] == [0] * ranks + [1] + [0] * (
            2 * ranks - 1
        )
