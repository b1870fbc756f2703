"""Rows 1 to 15: failures of encode instances."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from epd.request.encode import AT_ONCE
from tests.faults.scripted import Scripted, answer, read_head, read_request, reset, send, wait
from tests.requests import image, request, text
from tests.support.fake_instance import (
    FakeInstance,
    Handler,
    after,
    drops,
    encodes,
    fails_first,
    hangs,
    parts_of,
    refuses,
)
from tests.support.fleet import Launch, until

NOBODY = "http://127.0.0.1:9"


def busy(retry_after: str | None, status: int = 503) -> Handler:
    async def chat(_: web.Request, __: dict[str, Any]) -> web.Response:
        headers = {} if retry_after is None else {"Retry-After": retry_after}
        return web.json_response({"error": "busy"}, status=status, headers=headers)

    return chat


def encoded(*instances: FakeInstance) -> int:
    return sum(len(instance.calls) for instance in instances)


@pytest.mark.fault(1, 6, 7, 8)
@pytest.mark.parametrize("fault", [refuses(500), refuses(502), refuses(408), drops, hangs])
async def test_a_failed_encode_is_retried_at_another_instance(
    launch: Launch, fault: Handler
) -> None:
    config: Any = {"encode_timeout_s": 1.0, "encode_balance": "round_robin"}
    async with launch(encode=2, **config) as fleet:
        fleet.encode[0].chat = fault
        async with fleet.post(request(image(), text())) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-items"] == "hit=0,encoded=1,local=0"
            assert "x-epd-degraded" not in reply.headers

        assert [len(instance.calls) for instance in fleet.encode] == [1, 1]


@pytest.mark.fault(1)
async def test_decode_encodes_if_all_encode_instances_fail_with_a_degraded_header(
    launch: Launch,
) -> None:
    async with launch(encode=3) as fleet:
        for instance in fleet.encode:
            instance.chat = refuses(500)
        async with fleet.post(request(image())) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-degraded"] == "encode-local"
        async with fleet.http.get(f"{fleet.url}/metrics") as page:
            figures = await page.text()

        assert encoded(*fleet.encode) == 2
        assert "data" in str(fleet.d.calls[0].parts[0]["image_url"])
        assert fleet.events.requests[0].degraded == {"encode-local"}
        assert 'epd_requests_degraded_total{kind="encode-local",model_name="m"} 1.0' in figures


@pytest.mark.fault(1)
async def test_a_failed_encode_without_local_fallback_has_x_should_retry_false(
    launch: Launch,
) -> None:
    async with launch(on_encode_failure="fail") as fleet:
        fleet.e.chat = refuses(500)
        async with fleet.post(request(image())) as reply:
            assert reply.status == 502
            assert reply.headers["x-epd-error"] == "encode_failed"
            assert reply.headers["x-should-retry"] == "false"

        assert encoded(fleet.e) == 2  # it is the only one, and may have been restarted


@pytest.mark.fault(2)
@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_rejected_item_is_neither_retried_nor_counted_against_the_encoder(
    launch: Launch, status: int
) -> None:
    async with launch(encode=2, encode_balance="round_robin") as fleet:
        for instance in fleet.encode:
            instance.chat = refuses(status, "no picture")
        for number in range(6):
            async with fleet.post(request(text(), image(b"%d" % number))) as reply:
                assert reply.status == status
                assert reply.headers["x-epd-error"] == "encode_rejected"
                error = (await reply.json())["error"]
                assert (error["message"], error["param"]) == (
                    "no picture",
                    "messages[0].content[1]",
                )

        # Once, each instance is asked again without the model that it does not know.
        assert encoded(*fleet.encode) == 6 + 2 * (status == 404)
        assert fleet.events.changes == []


@pytest.mark.fault(3)
@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_of_ours_that_an_encoder_refuses_is_not_the_clients_fault(
    launch: Launch, status: int
) -> None:
    async with launch(encode=2, openai_api_key="ours-0123456789") as fleet:
        for instance in fleet.encode:
            instance.chat = refuses(status)
        async with fleet.post(request(image())) as reply:
            assert reply.status == 502
            assert reply.headers["x-epd-error"] == "encode_auth"

        assert encoded(*fleet.encode) == 1
        assert fleet.events.changes == []


@pytest.mark.fault(3)
async def test_a_key_of_the_clients_that_an_encoder_refuses_is(launch: Launch) -> None:
    async with launch() as fleet:
        fleet.e.chat = refuses(401, "wrong key")
        async with fleet.post(request(image()), {"Authorization": "Bearer theirs"}) as reply:
            assert reply.status == 401
            assert (await reply.json())["error"]["message"] == "wrong key"


@pytest.mark.fault(4)
@pytest.mark.parametrize("status", [429, 503])
async def test_an_overloaded_encoder_is_skipped_while_another_is_free(
    launch: Launch, status: int
) -> None:
    async with launch(encode=2, encode_balance="round_robin") as fleet:
        fleet.encode[0].chat = busy("30", status)
        for number in range(5):
            assert (await fleet.chat(request(image(b"%d" % number))))[0] == 200

        assert [len(instance.calls) for instance in fleet.encode] == [1, 5]
        assert fleet.events.changes == []


@pytest.mark.fault(4)
async def test_a_single_encode_instance_is_retried_after_its_retry_after(launch: Launch) -> None:
    async with launch() as fleet:
        fleet.e.chat = fails_first(1, busy("1"), encodes)
        async with fleet.post(request(image())) as reply:
            assert reply.headers["x-epd-items"] == "hit=0,encoded=1,local=0"

        first, second = (one for one in fleet.events.stages if one.stage == "encode")
        assert second.started_s - first.started_s >= 1


@pytest.mark.fault(4)
@pytest.mark.parametrize("retry_after", ["600", None, "Wed, 21 Oct 2037 07:28:00 GMT"])
async def test_an_encode_is_waited_for_at_most_its_timeout(
    launch: Launch, retry_after: str | None
) -> None:
    async with launch(on_encode_failure="fail", encode_timeout_s=5) as fleet:
        fleet.e.chat = busy(retry_after, 429)
        async with fleet.post(request(image())) as reply:
            assert reply.status == 503
            assert reply.headers["x-epd-error"] == "encode_overloaded"
            assert reply.headers["Retry-After"] == ("600" if retry_after == "600" else "1")
            assert "x-should-retry" not in reply.headers

        assert encoded(fleet.e) == 1


@pytest.mark.fault(5)
async def test_an_unreachable_encode_instance_is_retried_elsewhere_and_then_down(
    launch: Launch,
) -> None:
    async with launch(encode=1) as up:
        urls = (NOBODY, "http://no-such-host.invalid:1", up.e.url)
        config: Any = {"encode_servers_urls": urls, "encode_balance": "round_robin"}
        async with launch(**config) as fleet:
            for number in range(20):
                async with fleet.post(request(image(b"%d" % number))) as reply:
                    assert reply.headers["x-epd-items"] == "hit=0,encoded=1,local=0"

            states = {one.instance: one.state for one in fleet.events.changes}
            assert states[NOBODY] == "down"
            failed = [one for one in fleet.events.stages if one.instance == NOBODY]
            assert len(failed) == 1
            assert encoded(up.e) == 20


@pytest.mark.fault(6)
@pytest.mark.parametrize(
    "script", [[read_head(), reset()], [read_request(), send(b"HTTP/1.1 "), reset()]]
)
async def test_a_reset_before_the_answer_is_tried_again(launch: Launch, script: Any) -> None:
    async with Scripted(script).running() as broken:
        config: Any = {"encode_servers_urls": (broken.url,), "on_encode_failure": "fail"}
        async with launch(**config) as fleet:
            async with fleet.post(request(image())) as reply:
                assert reply.status == 502
                assert reply.headers["x-epd-error"] == "encode_failed"

            assert len(broken.exchanges) == 2


@pytest.mark.fault(7)
async def test_an_encode_that_times_out_is_cancelled_and_counts_as_a_failure(
    launch: Launch,
) -> None:
    config: Any = {"encode_timeout_s": 1.0, "eject_after": 2, "on_encode_failure": "fail"}
    async with launch(**config) as fleet:
        fleet.e.chat = hangs
        for number in range(2):
            async with fleet.post(request(image(b"%d" % number))) as reply:
                assert reply.status == 504
                assert reply.headers["x-epd-error"] == "encode_timeout"

        await until(lambda: fleet.e.aborted == 2)
        assert encoded(fleet.e) == 2
        assert [one.state for one in fleet.events.changes] == ["ejected"]


@pytest.mark.fault(8)
@pytest.mark.parametrize(
    "said",
    [
        answer(b"{", length=100),
        answer(b'{"choices": ['),
        answer(b"<html>oops"),
        answer(b"[]"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_an_invalid_answer_is_retried_on_another_encoder(launch: Launch, said: bytes) -> None:
    script = [read_request(), send(said), wait(0.05)]
    async with launch(encode=1) as up, Scripted(script).running() as broken:
        config: Any = {
            "encode_servers_urls": (broken.url, up.e.url),
            "encode_balance": "round_robin",
        }
        async with launch(**config) as fleet:
            async with fleet.post(request(image())) as reply:
                assert reply.status == 200
                assert reply.headers["x-epd-items"] == "hit=0,encoded=1,local=0"

            asked = [one for one in broken.exchanges if one.head.startswith(b"POST")]  # not a probe
            assert len(asked) == len(up.e.calls) == 1


@pytest.mark.fault(11)
async def test_all_items_are_sent_with_their_media_if_one_encode_fails(launch: Launch) -> None:
    async def fails_one(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        [part] = parts_of(body["messages"])
        bad = part["image_url"] == image(b"bad!")["image_url"]
        return await (refuses(500) if bad else encodes)(http, body)

    async with launch() as fleet:
        fleet.e.chat = fails_one
        async with fleet.post(request(image(b"good"), image(b"bad!"))) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-items"] == "hit=0,encoded=1,local=1"
            assert reply.headers["x-epd-degraded"] == "encode-local"

        assert all("data:" in str(part["image_url"]) for part in fleet.d.calls[0].parts)


@pytest.mark.fault(11)
async def test_other_encodes_are_cancelled_if_one_item_is_invalid(launch: Launch) -> None:
    async def fails_one(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        bad = body["messages"][0]["content"][0]["image_url"] == image(b"bad!")["image_url"]
        return await (refuses(500) if bad else hangs)(http, body)

    async with launch(on_encode_failure="fail") as fleet:
        fleet.e.chat = fails_one
        sent = request(image(b"good"), image(b"fine"), image(b"bad!"))

        status, reply = await asyncio.wait_for(fleet.chat(sent), 20)
        assert (status, reply["error"]["param"]) == (502, "messages[0].content[2]")
        await until(lambda: fleet.e.aborted == 2)


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    "params",
    [
        {"a": {"item_indices": [0], "metadata": {}}, "b": {"item_indices": [0], "metadata": {}}},
        {"a": {"item_indices": [7], "metadata": {}}},
        {"a": {"item_indices": [0, 0], "metadata": {}}},
        {"a": {"item_indices": "0", "metadata": {}}},
        {"a": []},
    ],
)
async def test_metadata_that_could_be_anothers_are_refused(launch: Launch, params: Any) -> None:
    async def chat(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [], "ec_transfer_params": params})

    async with launch(encode=2) as fleet:
        for instance in fleet.encode:
            instance.chat = chat
        async with fleet.post(request(image())) as reply:
            assert (reply.status, reply.headers["x-epd-error"]) == (502, "encode_metadata")
            assert (await reply.json())["error"]["param"] == "messages[0].content[0]"

        assert encoded(*fleet.encode) == 1
        assert fleet.d.calls == []


@pytest.mark.fault(13)
async def test_unreachable_encode_instances_end_in_a_local_encode_or_503(launch: Launch) -> None:
    for on_failure, status in (("local", 200), ("fail", 503)):
        config: Any = {"encode_servers_urls": (NOBODY, "http://127.0.0.1:10")}
        async with launch(**config, on_encode_failure=on_failure, eject_after=1) as fleet:
            await fleet.chat(request(image(b"1")))
            async with fleet.post(request(image(b"2"))) as reply:
                assert reply.status == status
                if status != 200:
                    assert reply.headers["x-epd-error"] == "no_encoder"
                    assert int(reply.headers["Retry-After"]) >= 1

            tried = {one.instance for one in fleet.events.stages if one.stage == "encode"}
            assert tried == set(config["encode_servers_urls"])


@pytest.mark.fault(14)
async def test_an_encode_instance_that_recovers_serves_again(launch: Launch) -> None:
    fast: Any = {"probe_interval_s": 0.2}
    async with launch(encode=2, encode_balance="round_robin", eject_after=2, **fast) as fleet:
        await until(lambda: fleet.encode[0].probes)
        fleet.encode[0].healthy = False
        states = fleet.events.changes
        await until(lambda: [one.state for one in states] == ["down"])
        await fleet.chat(request(image(b"1")))
        await fleet.chat(request(image(b"2")))
        assert encoded(fleet.encode[0]) == 0

        fleet.encode[0].healthy = True
        await until(lambda: [one.state for one in states] == ["down", "trial"])
        for number in range(4):
            await fleet.chat(request(image(b"more %d" % number)))
        assert encoded(fleet.encode[0]) > 0
        assert [one.state for one in states] == ["down", "trial", "healthy"]


@pytest.mark.fault(14)
@pytest.mark.parametrize(("starts", "at_once"), [(False, 1), (True, 3)])
async def test_an_instance_gets_one_request_at_a_time_after_an_outage_and_its_share_after_its_start(
    launch: Launch, *, starts: bool, at_once: int
) -> None:
    go_on = asyncio.Event()
    fast: Any = {"probe_interval_s": 0.2}

    launch.starting = int(starts)
    async with launch(encode=2, encode_balance="round_robin", **fast) as fleet:
        await until(lambda: fleet.e.probes)
        fleet.e.healthy = False
        await until(lambda: fleet.events.changes)
        fleet.e.healthy, fleet.e.chat = True, after(go_on, encodes)
        await until(lambda: len(fleet.events.changes) == 2)
        sent = [fleet.chat(request(image(b"%d" % number))) for number in range(6)]
        tasks = [asyncio.create_task(one) for one in sent]
        await until(lambda: encoded(*fleet.encode) == 6)

        assert encoded(fleet.e) == at_once
        go_on.set()
        assert {status for status, _ in await asyncio.gather(*tasks)} == {200}


@pytest.mark.fault(53, 58)
async def test_a_request_of_many_items_encodes_some_at_once_and_all_in_the_end(
    launch: Launch,
) -> None:
    """Each encode uses a connection, and all requests share the descriptors."""
    at_once: list[int] = []
    go_on = asyncio.Event()

    async def chat(asked: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        at_once.append(fleet.e.open)
        await go_on.wait()
        return await encodes(asked, body)

    async with launch(max_items=64) as fleet:
        fleet.e.chat = chat
        other = image(b"another's")
        asking = [
            asyncio.create_task(fleet.chat(request(*(image(b"%d" % i) for i in range(64))))),
        ]
        await until(lambda: fleet.e.open == AT_ONCE)
        asking.append(asyncio.create_task(fleet.chat(request(other))))
        await until(lambda: fleet.e.open == AT_ONCE + 1)
        await asyncio.sleep(0.1)
        go_on.set()

        assert [(await task)[0] for task in asking] == [200, 200]
        assert max(at_once) == AT_ONCE + 1
        assert len(at_once) == 65
