"""The relay and the scripted instance behave as the other tests assume."""

import asyncio

import aiohttp
import pytest

from tests.faults.scripted import (
    Scripted,
    answer,
    close,
    half_close,
    hold,
    read_head,
    read_request,
    reset,
    send,
)
from tests.support.fleet import until
from tests.support.relay import End, Relay

WHOLE = [read_request(), send(answer(b"x" * 100_000)), hold()]


async def ask(url: str, method: str = "POST") -> bytes:
    """Send a request; POST by default, since aiohttp retries an interrupted GET."""
    async with aiohttp.ClientSession() as http, http.request(method, url) as reply:
        return await reply.read()


async def test_a_relay_without_faults_changes_nothing() -> None:
    async with Scripted(WHOLE).running() as server, Relay(server.listener).running() as relay:
        assert await ask(relay.url(scheme="http")) == b"x" * 100_000
        await until(lambda: relay.listener.open == 0)
        await until(lambda: server.aborted == 1)


@pytest.mark.parametrize("end", ["close", "reset", "half_close"])
async def test_a_relay_cuts_an_answer(end: End) -> None:
    async with Scripted(WHOLE).running() as server, Relay(server.listener).running() as relay:
        relay.answers.cut_after, relay.answers.end = 50_000, end
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
            await ask(relay.url(scheme="http"))
        await until(lambda: server.aborted == 1)


async def test_a_relay_is_a_black_hole() -> None:
    async with Scripted(WHOLE).running() as server, Relay(server.listener).running() as relay:
        relay.answers.cut_after, relay.answers.end = 0, "silence"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(relay.url(scheme="http")), 0.2)
        await until(lambda: server.aborted == 1)


async def test_a_relay_is_late_and_slow() -> None:
    clock = asyncio.get_running_loop().time
    async with Scripted(WHOLE).running() as server, Relay(server.listener).running() as relay:
        relay.requests.latency_s, relay.answers.bytes_per_s = 0.1, 500_000
        began = clock()

        assert len(await ask(relay.url(scheme="http"))) == 100_000
        assert clock() - began > 0.25


async def test_relay_can_stop_accepting_and_reset_its_connections() -> None:
    async with (
        Scripted([read_head(), hold()]).running() as server,
        Relay(server.listener).running() as relay,
    ):
        waiting = asyncio.create_task(ask(relay.url(scheme="http")))
        await until(lambda: server.exchanges)
        relay.listener.accepting = False
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(relay.url(scheme="http")), 0.1)
        relay.listener.reset_all()
        with pytest.raises(aiohttp.ClientOSError):
            await waiting


async def test_scripts_are_followed_one_after_another_and_probes_take_none() -> None:
    scripts = ([reset()], [read_head(), close()], [read_head(), half_close()], WHOLE)
    async with Scripted(*scripts).running() as server:
        assert b"data" in await ask(f"{server.url}/health", "GET")
        for fault in (aiohttp.ClientOSError, *[aiohttp.ServerDisconnectedError] * 2):
            with pytest.raises(fault):
                await ask(server.url)
        for _ in range(2):
            assert await ask(server.url) == b"x" * 100_000
        assert server.exchanges[1].head.startswith(b"POST / HTTP/1.1")
        await until(lambda: all(each.done for each in server.exchanges))
        assert [each.left for each in server.exchanges] == [False, False, True, True, True]


async def test_an_invalid_script_is_not_a_fault() -> None:
    async def wrong(_: object) -> None:
        raise LookupError("a slip")

    with pytest.raises(ExceptionGroup) as caught:
        async with Scripted([wrong]).running() as server:
            await ask(server.url)

    assert caught.group_contains(LookupError, match="a slip")
