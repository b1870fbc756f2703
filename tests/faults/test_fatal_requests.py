"""Row 68: requests that kill instances."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from epd.edge.drain import DRAIN
from epd.routing.instances import Role
from epd.server.app_keys import TABLE
from epd.ui.state import metric_totals
from tests.faults.scripted import Scripted, answer, read_request, reset, send
from tests.requests import image, request, text
from tests.support.clients import ALICE, BOB, bearer
from tests.support.fake_instance import (
    FakeInstance,
    Handler,
    after,
    chunk,
    decodes,
    drops,
    encodes,
    hangs,
    prefills,
    refuses,
    streams_then,
)
from tests.support.fleet import Fleet, Launch, until

pytestmark = pytest.mark.fault(68)

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
KILLS = [drops, refuses(500, ENGINE_DEAD)]
KILLED = (503, "suspected_fatal")


def killed_by(handler: Handler, *instances: FakeInstance) -> None:
    for instance in instances:
        instance.chat = handler


def sent(instances: Iterable[FakeInstance]) -> int:
    return sum(len(instance.calls) for instance in instances)


async def outcome(
    fleet: Fleet, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, str | None]:
    async with fleet.post(body, headers) as reply:
        await reply.read()
        return reply.status, reply.headers.get("x-epd-error")


def releases(fleet: Fleet) -> int:
    return [stage.stage for stage in fleet.events.stages].count("release")


async def quarantined_tenants(fleet: Fleet) -> float:
    async with fleet.http.get(f"{fleet.url}/metrics") as page:
        shown = metric_totals(text_string_to_metric_families(await page.text()))
    return shown["quarantined"]


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("topology", [(4, 3, 3), (4, 0, 3), (1, 1, 1), (1, 0, 1), (2, 0, 2)])
async def test_a_fatal_request_reaches_two_instances(
    launch: Launch, topology: tuple[int, int, int], kill: Handler
) -> None:
    encode, prefill, decode = topology
    async with launch(encode, prefill, decode) as fleet:
        killed_by(kill, *fleet.instances)
        assert await outcome(fleet, request(text(), image())) == KILLED
        assert sent(fleet.instances) == 2


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefill", [0, 3])
async def test_a_fatal_text_reaches_two_instances(
    launch: Launch, kill: Handler, prefill: int, stream: bool
) -> None:
    async with launch(encode=1, prefill=prefill, decode=3) as fleet:
        killed_by(kill, *fleet.instances)
        assert await outcome(fleet, request(text(), stream=stream)) == KILLED
        assert sent(fleet.instances) == 2


async def test_a_fatal_request_is_rejected_at_once_when_it_comes_again(launch: Launch) -> None:
    async with launch(encode=4, decode=3) as fleet:
        killed_by(drops, *fleet.instances)
        body = request(text(), image())
        await outcome(fleet, body)
        async with fleet.post(body) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, reply.headers["x-epd-error"]) == KILLED
            assert error["type"] == "ServiceUnavailableError"
            assert reply.headers["x-should-retry"] == "false"
            assert 290 <= int(reply.headers["Retry-After"]) <= 300

        assert sent(fleet.instances) == 2


async def test_a_request_without_a_second_encode_instance_is_rejected_for_its_item(
    launch: Launch,
) -> None:
    """The item killed encode, and then decode, which encoded it itself."""
    async with launch(encode=1, decode=2) as fleet:
        killed_by(drops, *fleet.instances)
        await outcome(fleet, request(text("what?"), image(b"poison")))
        killed_by(encodes, *fleet.encode)
        killed_by(decodes, *fleet.decode)

        assert await outcome(fleet, request(text("who?"), image(b"poison"))) == KILLED
        assert await outcome(fleet, request(text("what?"), image(b"other"))) == (200, None)


async def test_a_fatal_request_of_one_tenant_rejects_no_other_tenants(
    launch: Launch, keys: Any
) -> None:
    async with launch(encode=4, api_keys_file=keys) as fleet:
        body = request(text(), image())
        killed_by(drops, *fleet.instances)
        assert await outcome(fleet, body, bearer(ALICE)) == KILLED
        killed_by(encodes, *fleet.encode)
        killed_by(decodes, *fleet.decode)

        assert await outcome(fleet, body, bearer(ALICE)) == KILLED
        assert await outcome(fleet, body, bearer(BOB)) == (200, None)


async def test_a_client_that_leaves_after_a_death_has_one_more(launch: Launch) -> None:
    async with launch(encode=4, encode_balance="round_robin") as fleet:
        killed_by(drops, fleet.encode[0])
        killed_by(hangs, *fleet.encode[1:])
        body = request(text(), image())
        left = asyncio.create_task(outcome(fleet, body))
        await until(lambda: sent(fleet.encode) == 2)
        left.cancel()
        await until(lambda: sum(one.aborted for one in fleet.encode) == 1)
        killed_by(drops, *fleet.encode)

        assert await outcome(fleet, body) == KILLED
        assert sent(fleet.encode) == 3  # one that hung did not die


DIED = f'data: {{"error": {{"message": "{ENGINE_DEAD}", "code": 500}}}}\n\n'.encode()
"""Event of a dead engine, which then ends the stream."""


@pytest.mark.parametrize(
    "events",
    [[chunk("a")], [chunk("a"), DIED], [DIED, b"data: [DONE]\n\n"]],
    ids=["reset", "error", "error first"],
)
async def test_a_request_is_rejected_after_two_instances_died_in_its_streams(
    launch: Launch, events: list[bytes]
) -> None:
    dies = streams_then(*events, then=None if DIED in events else drops)

    async with launch(decode=3, decode_balance="round_robin") as fleet:
        killed_by(dies, *fleet.decode)
        body = request(text(), stream=True)
        first, second = [await outcome(fleet, body) for _ in range(2)]

        assert (first, second) == ((200, None), (200, None))
        assert await outcome(fleet, body) == KILLED
        assert sent(fleet.decode) == 2


@pytest.mark.parametrize(
    ("role", "then", "body"),
    [("decode", decodes, request(text())), ("encode", encodes, request(text(), image()))],
)
async def test_a_death_is_forgotten_once_the_same_is_processed_without_harm(
    launch: Launch, role: str, then: Handler, body: dict[str, Any]
) -> None:
    """Each instance dies once, and each time another one processes its request."""
    balance: Any = {f"{role}_balance": "round_robin"}
    async with launch(encode=2, decode=2, **balance) as fleet:
        for victim in getattr(fleet, role):
            asked = len(victim.calls)
            killed_by(drops, victim)
            while len(victim.calls) == asked:
                assert await outcome(fleet, body) == (200, None)
            killed_by(then, victim)


async def test_one_death_of_an_instance_counts_once_for_all_that_ask_for_the_same(
    launch: Launch,
) -> None:
    """A killed engine fails all of its requests, and keeps failing until its server ends."""
    async with launch(decode=2) as fleet:
        killed_by(hangs, fleet.decode[0])
        body = request(text())
        waiting = [asyncio.create_task(outcome(fleet, body)) for _ in range(8)]
        await until(lambda: sent(fleet.decode) == 8)
        for connection in fleet.decode[0].connections:
            connection.abort()
        ended = await asyncio.gather(*waiting)

        assert set(ended) == {(200, None)}


async def test_the_end_of_a_drained_instance_is_not_blamed_on_a_request(launch: Launch) -> None:
    async with launch(encode=3, decode=1, encode_balance="round_robin") as fleet:
        killed_by(drops, *fleet.encode)
        fleet.runner.app[DRAIN].began = True
        async with fleet.post(request(image())) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-degraded"] == "encode-local"


@pytest.mark.parametrize("fault", [refuses(500, "bug"), refuses(502), refuses(408), hangs])
async def test_other_failures_do_not_count_as_deaths(launch: Launch, fault: Handler) -> None:
    async with launch(encode=3, encode_timeout_s=0.3) as fleet:
        killed_by(fault, *fleet.encode)
        async with fleet.post(request(image())) as reply:
            assert reply.status == 200
            assert reply.headers["x-epd-degraded"] == "encode-local"


async def test_an_instance_that_breaks_off_its_whole_answer_has_survived_the_request(
    launch: Launch,
) -> None:
    cut = [read_request(), send(answer(b"{}", length=100)), reset()]
    async with (
        Scripted(cut).running() as first,
        Scripted(cut).running() as second,
        launch(encode_servers_urls=(first.url, second.url)) as fleet,
        fleet.post(request(image())) as reply,
    ):
        assert reply.status == 200
        assert reply.headers["x-epd-degraded"] == "encode-local"


async def test_requests_with_the_same_fatal_item_at_once_meet_two_instances(
    launch: Launch,
) -> None:
    """One request waits for the other's encode, and tries by itself when that fails."""

    async def dies_late(request: web.Request, body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(0.2)
        return await drops(request, body)

    async with launch(encode=4, encode_balance="round_robin") as fleet:
        killed_by(dies_late, *fleet.encode)
        bodies = [request(text(str(number)), image(b"poison")) for number in range(3)]
        ended = await asyncio.gather(*(outcome(fleet, body) for body in bodies))

        assert set(ended) == {KILLED}
        assert sent(fleet.encode) == 2


async def test_an_item_of_which_instances_died_meanwhile_goes_to_no_other_stage(
    launch: Launch,
) -> None:
    """Requests with different `Authorization` share no encode."""
    go_on = asyncio.Event()

    async with launch(encode=1, decode=2) as fleet:
        fleet.e.chat = after(go_on, refuses(503, "busy"))
        first, second = ({"Authorization": f"Bearer {key}"} for key in "ab")
        slow = asyncio.create_task(outcome(fleet, request(text("1"), image()), first))
        await until(lambda: len(fleet.e.calls) == 1)
        killed_by(drops, *fleet.instances)
        assert await outcome(fleet, request(text("2"), image()), second) == KILLED
        killed_by(decodes, *fleet.decode)
        go_on.set()

        assert await slow == KILLED
        assert sent(fleet.instances) == 3


@pytest.mark.parametrize("topology", [(0, 0, 3), (1, 0, 3), (3, 0, 3), (1, 3, 3)])
async def test_suspect_s_0_rejects_no_request_after_deaths(
    launch: Launch, topology: tuple[int, int, int]
) -> None:
    """A request still tries only two instances."""
    async with launch(*topology, suspect_s=0) as fleet:
        killed_by(drops, *fleet.instances)
        body = request(text(), *([image()] if topology[0] else []))
        assert (await outcome(fleet, body))[0] == 502
        assert sent(fleet.instances) == 2
        killed_by(encodes, *fleet.encode)
        killed_by(prefills, *fleet.prefill)
        killed_by(decodes, *fleet.decode)

        assert await outcome(fleet, body) == (200, None)


async def test_the_log_names_the_instance_and_nothing_of_the_request(launch: Launch) -> None:
    async with launch(decode=3) as fleet:
        killed_by(drops, *fleet.decode)
        with capture_logs() as logs:
            await outcome(fleet, request(text("secret words")))

        [line] = [one for one in logs if one["event"].startswith("request rejected")]
        assert line["instance"] in {one.url for one in fleet.decode}
        assert line["rejected_s"] == 300
        assert "secret" not in str(line)


async def test_a_decode_death_sends_no_release_to_another_instance(launch: Launch) -> None:
    async with launch(prefill=2, decode=3) as fleet:
        killed_by(drops, *fleet.decode)
        assert await outcome(fleet, request(text())) == KILLED
        await asyncio.sleep(0.2)  # a release would have been sent by now

        assert sent(fleet.decode) == 2


async def test_a_client_that_disconnects_after_a_decode_death_causes_no_release(
    launch: Launch,
) -> None:
    async with launch(prefill=2, decode=2) as fleet:
        first = iter([drops])
        for instance in fleet.decode:

            async def dies_then_hangs(
                request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                return await next(first, hangs)(request, body)

            instance.chat = dies_then_hangs
        task = asyncio.create_task(fleet.chat(request(text())))
        await until(lambda: sent(fleet.decode) == 2)
        task.cancel()
        await until(lambda: fleet.events.requests)
        await asyncio.sleep(0.2)  # a release would have been sent by now

        assert sent(fleet.decode) == 2


async def test_a_reused_connection_hides_no_death(launch: Launch) -> None:
    """A dying server closes its connection, like one that closes an idle connection.

    But it does not accept a new one.
    """
    async with launch(encode=3, encode_balance="round_robin") as fleet:
        for number in range(3):
            assert await outcome(fleet, request(image(b"%d" % number))) == (200, None)
        for instance in fleet.encode:
            instance.chat = ends_with(instance)

        assert await outcome(fleet, request(image(b"poison"))) == KILLED
        assert sent(fleet.encode) == 3 + 2


def ends_with(instance: FakeInstance) -> Handler:
    """Return a handler that stops listening and drops the connection, as a dying process does."""

    async def chat(request: web.Request, body: dict[str, Any]) -> web.Response:
        await instance.stop_listening()
        return await drops(request, body)

    return chat


@pytest.mark.parametrize("failure", ["local", "fail"])
@pytest.mark.parametrize("encode", [1, 2, 4])
async def test_one_death_fails_no_request_of_many_items(
    launch: Launch, encode: int, failure: str
) -> None:
    """All items at the instance fail at the same moment."""
    config: dict[str, Any] = {"on_encode_failure": failure, "encode_balance": "round_robin"}
    async with launch(encode=encode, decode=2, **config) as fleet:  # each has some of the items
        killed_by(hangs, fleet.e)
        parts = [image(b"%d" % number) for number in range(8)]
        waiting = asyncio.create_task(outcome(fleet, request(text(), *parts)))
        await until(lambda: fleet.e.calls)
        await asyncio.sleep(0.1)
        killed_by(encodes, fleet.e)
        for connection in [*fleet.e.connections]:
            connection.abort()

        assert await waiting == (200, None)


async def test_instances_that_are_down_die_too(launch: Launch) -> None:
    async with launch(encode=3, decode=3, probe_interval_s=0.05) as fleet:
        for instance in fleet.instances:
            instance.healthy = False
        killed_by(drops, *fleet.instances)
        await until(lambda: len(fleet.events.changes) == 6)
        assert await outcome(fleet, request(text(), image())) == KILLED

        assert sent(fleet.instances) == 2


async def test_an_instance_that_was_drained_and_removed_does_not_die(launch: Launch) -> None:
    async with launch(encode=0, encode_servers_urls=(), decode=3) as fleet:
        table, body = fleet.runner.app[TABLE], request(text())
        killed_by(hangs, *fleet.decode)
        waiting = asyncio.create_task(outcome(fleet, body))
        await until(lambda: sent(fleet.decode) == 1)
        [leaving] = [one for one in fleet.decode if one.calls]
        [old] = [one for one in table.of_roles(Role.PREFILL_DECODE) if one.url == leaving.url]
        table.set_weight(old, drained := replace(old, weight=0.0))
        table.remove(drained)
        others = [one for one in fleet.decode if one is not leaving]
        killed_by(drops, *others)
        for connection in [*leaving.connections]:
            connection.abort()
        await waiting

        assert await outcome(fleet, body) == KILLED
        assert sent(others) == 2  # each died once


async def test_a_release_that_an_instance_dies_of_counts(launch: Launch) -> None:
    async with launch(prefill=2, decode=4, decode_balance="round_robin") as fleet:
        killed_by(drops, *fleet.decode)
        killed_by(refuses(503), fleet.d)
        body = request(text())
        ended = [await outcome(fleet, body) for _ in range(3)]
        died = [one for one in fleet.decode[1:] if one.calls]

        assert ended[-1] == KILLED
        assert len(died) <= 2


def poisoned(*instances: FakeInstance) -> None:
    """Let the instances die of each request with the word poison, and serve others."""

    async def chat(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (drops if "poison" in str(body) else decodes)(http, body)

    killed_by(chat, *instances)


def serving(fleet: Fleet, word: str) -> list[FakeInstance]:
    """Return the decode instances that have received this word."""
    return [one for one in fleet.decode if any(word in str(call.body) for call in one.calls)]


@pytest.mark.parametrize("mixed", [False, True])
async def test_a_request_that_varies_ends_few_instances(launch: Launch, *, mixed: bool) -> None:
    """Other requests of the client go on."""
    async with launch(decode=8, decode_balance="round_robin") as fleet:
        poisoned(*fleet.decode)
        for number in range(8):
            assert await outcome(fleet, request(text(f"poison {number}"))) == KILLED
            if mixed:
                other = request(text(f"a much longer text, and so of another kind {number}"))
                assert await outcome(fleet, other) == (200, None)

        assert len(serving(fleet, "poison")) <= 4


async def test_a_picture_that_varies_ends_few_instances(launch: Launch) -> None:
    async with launch(encode=8, decode=8, encode_balance="round_robin") as fleet:
        killed_by(drops, *fleet.encode, *fleet.decode)
        for number in range(8):
            body = request(text(), image(b"poison %d" % number))
            assert await outcome(fleet, body) == KILLED

        assert sum(bool(one.calls) for one in [*fleet.encode, *fleet.decode]) <= 4


async def test_a_request_in_quarantine_goes_to_no_other_instance_while_its_own_is_down(
    launch: Launch,
) -> None:
    async with launch(decode=8, decode_balance="round_robin", probe_interval_s=60) as fleet:
        poisoned(*fleet.decode)
        for number in range(2):
            await outcome(fleet, request(text(f"poison {number}")))
        for instance in fleet.decode:
            instance.chat = ends_with(instance)
        for number in range(2, 8):
            assert await outcome(fleet, request(text(f"poison {number}"))) == KILLED

        assert len(serving(fleet, "poison")) <= 4


@pytest.mark.fault(98)
async def test_decode_encodes_for_a_request_in_quarantine_while_its_encode_instance_is_down(
    launch: Launch,
) -> None:
    """The instance did not die of such requests."""

    async def closes(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = await encodes(http, body)
        answer.force_close()
        return answer

    async with launch(2, decode=4, decode_balance="round_robin", probe_interval_s=60) as fleet:
        poisoned(*fleet.decode)
        killed_by(closes, *fleet.encode)
        for number in range(2):
            await outcome(fleet, request(text(f"poison {number}")))
        async with fleet.post(request(image(b"0"))) as reply:
            assert (reply.status, reply.headers["x-epd-items"]) == (200, "hit=0,encoded=1,local=0")
        [pinned] = [instance for instance in fleet.encode if instance.calls]
        await pinned.stop_listening()
        for number in range(3):
            picture = image(b"of another kind %d" % number)
            async with fleet.post(request(picture, text("apples" * 200 * 2**number))) as reply:
                assert reply.status == 200
                assert reply.headers["x-epd-items"] == "hit=0,encoded=0,local=1"

        assert sum(bool(instance.calls) for instance in fleet.encode) == 1
        assert len(serving(fleet, "apples")) == 1


@pytest.mark.parametrize("role", ["encode", "prefill"])
async def test_no_other_stage_serves_a_request_in_quarantine_whose_only_instance_died_of_such(
    launch: Launch, role: str
) -> None:
    encode, prefill = (1, 0) if role == "encode" else (0, 1)
    async with launch(encode, prefill, 4, on_prefill_failure="local", probe_interval_s=60) as fleet:
        [only] = getattr(fleet, role)

        def poison(number: int) -> dict[str, Any]:
            return request(text(f"poison {number}"), *[image(b"%d" % number)] * encode)

        poisoned(*fleet.decode)
        assert await outcome(fleet, poison(0)) == KILLED  # by two decode instances
        only.chat = drops
        await outcome(fleet, poison(1))
        await only.stop_listening()
        before = sent(fleet.decode)
        for number in range(2, 5):
            assert await outcome(fleet, poison(number)) == KILLED

        assert sent(fleet.decode) == before


@pytest.mark.fault(160)
async def test_a_request_in_quarantine_is_not_prefilled_again_while_its_decode_instance_is_down(
    launch: Launch,
) -> None:
    async def chat(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = await (drops if "poison" in str(body) else decodes)(http, body)
        answer.force_close()
        return answer

    async with launch(0, 2, 4, decode_balance="round_robin", probe_interval_s=60) as fleet:
        killed_by(chat, *fleet.decode)
        for number in range(2):
            await outcome(fleet, request(text(f"poison {number}")))
        assert await outcome(fleet, request(text("apples" * 100))) == (200, None)
        [pinned] = serving(fleet, "apples")
        await pinned.stop_listening()
        await outcome(fleet, request(text("apples" * 300)))
        await until(lambda: releases(fleet) == 1)
        before = sent(fleet.prefill)
        assert await outcome(fleet, request(text("apples" * 900))) == KILLED

        assert sent(fleet.prefill) == before + 1
        # The choice of a decode instance failed. Another one is asked to release the blocks.
        await until(lambda: releases(fleet) == 2)


async def test_requests_in_quarantine_are_served_one_at_a_time_until_their_kind_is_proven(
    launch: Launch,
) -> None:
    go_on = asyncio.Event()

    async with launch(decode=4, decode_balance="round_robin") as fleet:
        assert await quarantined_tenants(fleet) == 0
        poisoned(*fleet.decode)
        with capture_logs() as logs:
            for number in range(2):
                await outcome(fleet, request(text(f"poison {number}")))
        assert sum("tenant in quarantine" in line["event"] for line in logs) == 1
        assert await quarantined_tenants(fleet) == 1
        before = sent(fleet.decode)
        killed_by(after(go_on, decodes), *fleet.decode)
        asked = [
            asyncio.create_task(outcome(fleet, request(text(f"{number} of another kind" * 20))))
            for number in range(10)
        ]
        await until(lambda: sent(fleet.decode) == before + 1)
        await asyncio.sleep(0.1)  # the others would have been sent by now
        assert sent(fleet.decode) == before + 1
        go_on.set()

        assert {await one for one in asked} == {(200, None)}
        for number in range(4):
            body = request(text(f"{number} is of a proven kind" * 20))
            assert await outcome(fleet, body) == (200, None)
        assert len(serving(fleet, "of a proven kind")) > 1
