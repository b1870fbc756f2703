"""Rows 30 to 35 and 44: prefill and decode instances that fail before an answer has started."""

import asyncio
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from epd.request.recovery import MAX_ATTEMPTS, MAX_FAILURES
from epd.request.releases import Releases
from epd.server import app as proxy_app
from tests.requests import image, request, text
from tests.support.fake_instance import (
    KV_PARAMS,
    FakeInstance,
    Handler,
    decodes,
    drops,
    fails_first,
    hangs,
    prefills,
    refuses,
)
from tests.support.fleet import Fleet, Launch, until

NOBODY = "http://127.0.0.1:9"
FAIL: Any = {"on_prefill_failure": "fail"}


UNREACHED: Any = tuple(f"http://127.0.0.{number}:9" for number in range(1, MAX_ATTEMPTS + 4))


@pytest.mark.fault(30)
async def test_decode_prefills_when_many_prefill_instances_are_unreachable(launch: Launch) -> None:
    async with launch(prefill_servers_urls=UNREACHED) as fleet:
        async with fleet.post(request(text())) as reply:
            assert (reply.status, reply.headers["x-epd-degraded"]) == (200, "prefill-local")

        [done] = fleet.events.requests
        tries = [one for one in done.stages if one.stage == "prefill"]
        assert len(tries) == MAX_ATTEMPTS - MAX_FAILURES


@pytest.mark.fault(30)
async def test_retries_that_were_made_are_counted_and_the_one_that_was_not_is_not(
    launch: Launch,
) -> None:
    """Each prefill instance refuses connections; the proxy tries the next one, up to a limit."""
    async with launch(prefill_servers_urls=UNREACHED, **FAIL) as fleet:
        async with fleet.post(request(text())) as reply:
            assert (reply.status, reply.headers["x-epd-stage"]) == (502, "prefill")

        [done] = fleet.events.requests
        tries = [one for one in done.stages if one.stage == "prefill"]
        assert (len(tries), done.retries) == (MAX_ATTEMPTS, MAX_ATTEMPTS - 1)


async def forgets(_: web.Request, __: dict[str, Any]) -> web.Response:
    return web.json_response({"choices": [], "kv_transfer_params": None})


def given(instance: FakeInstance) -> list[Any]:
    """Return the kv_transfer_params that an instance received."""
    return [call.body.get("kv_transfer_params") for call in instance.calls]


def releases(instance: FakeInstance) -> list[dict[str, Any]]:
    """Return the requests that make a decode instance release an abandoned prefill."""
    return [call.body for call in instance.calls if call.body.get("max_tokens") == 1]


@pytest.mark.fault(30)
@pytest.mark.parametrize("fault", [refuses(500), refuses(503), drops, hangs])
async def test_a_failed_prefill_is_retried_at_another_instance(
    launch: Launch, fault: Handler
) -> None:
    async with launch(prefill=2, prefill_timeout_s=1 if fault is hangs else 30) as fleet:
        fleet.prefill[0].chat = fault
        async with fleet.post(request(text(), image())) as reply:
            assert reply.status == 200
            assert "x-epd-degraded" not in reply.headers

        assert [len(one.calls) for one in fleet.prefill] == [1, 1]
        assert given(fleet.d) == [KV_PARAMS]
        assert fleet.events.requests[0].retries == 1


@pytest.mark.fault(30)
async def test_decode_prefills_if_all_prefills_fail_with_a_degraded_header(launch: Launch) -> None:
    async with launch(prefill=3) as fleet:
        for instance in fleet.prefill:
            instance.chat = refuses(500)
        async with fleet.post(request(image())) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-degraded"] == "prefill-local"

        assert sum(len(one.calls) for one in fleet.prefill) == 2
        assert given(fleet.d) == [None]
        assert "data:" in str(fleet.d.calls[0].parts[0])  # it may have no encoder store


@pytest.mark.fault(30)
@pytest.mark.parametrize(
    ("fault", "status", "slug"),
    [
        (refuses(500), 502, "prefill_failed"),
        (drops, 503, "suspected_fatal"),
        (hangs, 504, "prefill_timeout"),
        (refuses(503), 503, "prefill_overloaded"),
    ],
)
async def test_a_failed_prefill_without_local_fallback_fails_the_request(
    launch: Launch, fault: Handler, status: int, slug: str
) -> None:
    timeout_s = 0.2 if fault is hangs else 30
    async with launch(prefill=2, prefill_timeout_s=timeout_s, **FAIL) as fleet:
        for instance in fleet.prefill:
            instance.chat = fault
        async with fleet.post(request(text())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (status, slug)

        assert [len(one.calls) for one in fleet.prefill] == [1, 1]
        assert fleet.d.calls == []


@pytest.mark.fault(30)
async def test_a_rejection_by_prefill_reaches_the_client(launch: Launch) -> None:
    async with launch(prefill=2) as fleet:
        for instance in fleet.prefill:
            instance.chat = refuses(400, "too long")
        status, reply = await fleet.chat(request(text()))

        assert (status, reply["error"]["message"]) == (400, "too long")
        assert sum(len(one.calls) for one in fleet.prefill) == 1


@pytest.mark.fault(30)
async def test_an_unreachable_prefill_is_skipped(launch: Launch) -> None:
    async with launch(prefill=1) as up, launch(prefill_servers_urls=(NOBODY, up.p.url)) as fleet:
        for _ in range(20):
            async with fleet.post(request(text())) as reply:
                assert reply.status == 200
                assert "x-epd-degraded" not in reply.headers

        assert len(up.p.calls) == 20
        failed = [one for one in fleet.events.stages if one.instance == NOBODY]
        assert len(failed) == 1
        [change] = fleet.events.changes
        assert (change.state, change.cause) == ("down", "connection refused")


@pytest.mark.fault(31)
async def test_a_prefill_that_transfers_nothing_is_done_by_decode(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        fleet.p.chat = forgets
        async with fleet.post(request(text())) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-degraded"] == "prefill-local"


@pytest.mark.fault(31)
async def test_a_prefill_that_transfers_nothing_is_an_error_where_one_wants_that(
    launch: Launch,
) -> None:
    async with launch(prefill=1, **FAIL) as fleet:
        fleet.p.chat = forgets
        async with fleet.post(request(text())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (502, "prefill_no_kv")
            assert "--kv-transfer-config" in (await reply.json())["error"]["message"]


@pytest.mark.fault(32, 34)
async def test_decode_that_could_not_fetch_is_retried_if_no_other_is_reachable(
    launch: Launch,
) -> None:
    """Prefill and one decode instance die together; the other ones serve the request."""
    async with launch(prefill=2, decode=1) as fleet:
        fleet.d.chat = fails_first(1, refuses(500), decodes)
        urls = (fleet.d.url, NOBODY)
        async with launch(prefill=2, decode_servers_urls=urls) as proxy:
            for _ in range(2):
                async with proxy.post(request(text())) as reply:
                    assert reply.status == 200, await reply.text()


@pytest.mark.fault(32, 33)
async def test_prefill_is_repeated_if_decode_cannot_read_its_blocks(
    launch: Launch,
) -> None:
    made: list[dict[str, Any]] = []

    async def fresh(_: web.Request, __: dict[str, Any]) -> web.Response:
        made.append({**KV_PARAMS, "remote_request_id": f"chatcmpl-{len(made)}"})
        return web.json_response({"choices": [], "kv_transfer_params": made[-1]})

    async with launch(prefill=2) as fleet:
        for instance in fleet.prefill:
            instance.chat = fresh
        fleet.d.chat = fails_first(1, refuses(500, "KV load failed"), decodes)
        status, _ = await fleet.chat(request(text()))

        assert status == 200
        assert given(fleet.d) == made
        assert len(made) == 2
        # Each prefill instance got one request.
        assert [len(one.calls) for one in fleet.prefill] == [1, 1]


@pytest.mark.fault(33)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_for_which_prefill_keeps_its_blocks_is_measured(
    launch: Launch, stream: bool
) -> None:
    async with launch(prefill=1) as fleet:

        async def queues(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(0.2)
            return await decodes(http, body)

        fleet.d.chat = queues
        async with fleet.post(request(text(), stream=stream)) as reply:
            await reply.read()
        async with fleet.http.get(f"{fleet.url}/metrics") as page:
            figures = await page.text()

        done = fleet.events.requests[0]
        if stream:
            assert done.kv_wait_s is not None
            assert done.kv_wait_s >= 0.2
        else:  # the first byte arrives with the last token
            assert done.kv_wait_s is None
        assert f"epd_kv_wait_seconds_count {float(stream)}" in figures


@pytest.mark.fault(32)
async def test_a_prefill_is_repeated_once(launch: Launch) -> None:
    async with launch(prefill=2) as fleet:
        fleet.d.chat = refuses(500, "KV load failed")
        async with fleet.post(request(text())) as reply:
            assert (reply.status, reply.headers["x-epd-stage"]) == (500, "decode")
            assert reply.headers["x-should-retry"] == "false"

        assert len(fleet.d.calls) == 2
        assert releases(fleet.d) == []  # decode has answered, and has told prefill itself


@pytest.mark.fault(34)
@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("fault", [refuses(503), refuses(502), drops])
async def test_a_failed_decode_is_retried_at_another_instance(
    launch: Launch, fault: Handler, prefill: int
) -> None:
    async with launch(prefill=prefill, decode=2) as fleet:
        fleet.decode[0].chat = fault
        async with fleet.post(request(text(), image(), stream=True)) as reply:
            assert reply.status == 200
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")

        assert len(fleet.encode[0].calls) == 1  # the encoder output is still stored
        assert sum(len(one.calls) for one in fleet.prefill) == 2 * prefill


@pytest.mark.fault(34)
async def test_an_unreachable_decode_is_skipped_and_prefilled_blocks_are_released(
    launch: Launch,
) -> None:
    async with launch(prefill=1, decode=1) as up:
        config: Any = {
            "prefill_servers_urls": (up.p.url,),
            "decode_servers_urls": (NOBODY, up.d.url),
        }
        async with launch(**config) as fleet:
            for _ in range(20):
                assert (await fleet.chat(request(text())))[0] == 200

            assert [one.state for one in fleet.events.changes] == ["down"]
            await until(lambda: len(releases(up.d)) == 1)
            assert len(up.d.calls) == 21
            assert all(body["kv_transfer_params"] == KV_PARAMS for body in releases(up.d))


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("fault", "status", "slug", "calls"),
    [
        (refuses(503, "busy"), 503, "decode_failed", 2),
        (drops, 503, "suspected_fatal", 2),
        (refuses(500, "bug"), 500, "decode_failed", 2),
        (hangs, 504, "decode_timeout", 2),
    ],
)
async def test_two_failed_decodes_fail_the_request(
    launch: Launch, fault: Handler, status: int, slug: str, calls: int
) -> None:
    async with launch(decode=3, first_byte_timeout_s=1.0) as fleet:
        for instance in fleet.decode:
            instance.chat = fault
        async with fleet.post(request(text(), stream=True)) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (status, slug)

        assert sum(len(one.calls) for one in fleet.decode) == calls


@pytest.mark.fault(15, 35)
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("fault", [refuses(503, "overloaded"), refuses(502), drops])
@pytest.mark.parametrize("prefill", [0, 2])
async def test_a_request_survives_a_lost_entry_beside_a_faulty_instance(
    launch: Launch, prefill: int, fault: Handler, bad: int
) -> None:
    topology = {"prefill": 2, "decode": 1} if prefill else {"decode": 2}
    async with launch(**topology, on_prefill_failure="fail") as fleet:
        consumers, then = (fleet.prefill, prefills) if prefill else (fleet.decode, decodes)
        consumers[bad].chat = fault
        consumers[1 - bad].chat = fails_first(1, refuses(500, "EC load failed"), then)
        status, _ = await fleet.chat(request(image()))

        assert status == 200
        assert [len(one.calls) for one in consumers] == ([1, 2] if bad == 0 else [2, 1])
        assert len(fleet.e.calls) == 2


async def leave_in_decode(fleet: Fleet, *, stream: bool) -> None:
    task = asyncio.create_task(fleet.chat(request(text(), stream=stream)))
    await until(lambda: fleet.d.calls)
    fleet.d.chat = decodes
    task.cancel()
    await until(lambda: fleet.events.requests)


@pytest.mark.fault(44)
@pytest.mark.parametrize("stream", [False, True])
async def test_decode_gets_a_release_for_an_abandoned_prefill(launch: Launch, stream: bool) -> None:
    async with launch(prefill=1) as fleet:
        fleet.d.chat = hangs
        await leave_in_decode(fleet, stream=stream)

        await until(lambda: fleet.d.aborted and releases(fleet.d))
        [told] = releases(fleet.d)
        assert told["kv_transfer_params"] == KV_PARAMS
        assert told["stream"] is True
        assert [event.status for event in fleet.events.requests] == [499]
        await until(lambda: fleet.events.stages[-1].stage == "release")
        assert fleet.events.stages[-1].error is None


@pytest.mark.fault(44)
async def test_a_release_is_sent_once_with_a_timeout(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_app, "Releases", partial(Releases, _timeout_s=0.2))
    async with launch(prefill=1) as fleet:
        fleet.d.chat = hangs
        task = asyncio.create_task(fleet.chat(request(text())))
        await until(lambda: fleet.d.calls)
        task.cancel()

        await until(lambda: fleet.d.aborted == 2, 3)
        await until(lambda: fleet.events.stages[-1].stage == "release")
        assert fleet.events.stages[-1].error == "release_timeout"
        assert len(fleet.d.calls) == 2


@pytest.mark.fault(44)
async def test_the_end_of_the_proxy_waits_for_releases(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:

        async def slow(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(0.3)
            return await decodes(http, body)

        fleet.d.chat = hangs
        task = asyncio.create_task(fleet.chat(request(text())))
        await until(lambda: fleet.d.calls)
        fleet.d.chat = slow
        task.cancel()
        await until(lambda: fleet.events.requests)

    assert len(releases(fleet.d)) == 1
    assert fleet.events.stages[-1].stage == "release"
    assert fleet.events.stages[-1].error is None


@pytest.mark.fault(36, 44)
async def test_blocks_are_released_if_decode_rejects_the_request(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        fleet.d.chat = fails_first(1, refuses(400, "max_tokens must be at least 1"), decodes)
        status, _ = await fleet.chat(request(text(), max_tokens=0))

        assert status == 400
        await until(lambda: releases(fleet.d))
        assert releases(fleet.d)[0]["kv_transfer_params"] == KV_PARAMS


@pytest.mark.fault(32)
async def test_decode_that_answers_in_between_is_not_judged_by_failures_of_prefill(
    launch: Launch,
) -> None:
    async def pulls(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        lost = len(fleet.decode[0].calls) % 2 == 0
        return await (refuses(500, "KV load failed") if lost else decodes)(http, body)

    balance: Any = {"decode_balance": "round_robin"}
    async with launch(prefill=1, decode=2, eject_after=1, **balance) as fleet:
        fleet.decode[0].chat = pulls
        for _ in range(12):
            assert (await fleet.chat(request(text())))[0] == 200

        assert len(fleet.decode[0].calls) >= 6
        assert fleet.events.changes == []


@pytest.mark.fault(43)
async def test_no_release_is_sent_without_a_prefill(launch: Launch) -> None:
    async with launch(prefill=1) as fleet:
        fleet.p.chat = hangs
        task = asyncio.create_task(fleet.chat(request(image())))
        await until(lambda: fleet.p.calls)
        task.cancel()
        await until(lambda: fleet.p.aborted and fleet.events.requests)

        assert fleet.d.calls == []
