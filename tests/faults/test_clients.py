"""Clients that disconnect at every stage of a request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.scripted import STREAM_HEAD, Script, Scripted, chunked, hold, read_request, send
from tests.requests import image, request, text
from tests.support.fake_instance import chunk
from tests.support.fleet import Fleet, Launch, until

SOON_S = 20.0
"""Deadline of a disconnect; the requirement is 100 ms, but a test machine may be busy."""


@asynccontextmanager
async def gone_within(deadline_s: float) -> AsyncIterator[None]:
    """Fail if the block takes longer."""
    async with asyncio.timeout(deadline_s):
        yield


async def leaves(fleet: Fleet, instance: Scripted, stream: bool, calls: int = 1) -> None:
    """Send a request, and disconnect when it has reached the instance."""
    task = asyncio.create_task(fleet.chat(request(image(b"1"), image(b"2"), text(), stream=stream)))
    await until(lambda: len([each for each in instance.exchanges if each.head]) == calls)
    task.cancel()
    async with gone_within(SOON_S):
        await until(lambda: instance.aborted == calls)
        await until(lambda: fleet.events.requests)

    assert [done.status for done in fleet.events.requests] == [499]


@pytest.mark.fault(42)
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_disconnects_during_its_body_causes_no_request(
    launch: Launch, how: str
) -> None:
    async with launch() as fleet:
        host, _, port = fleet.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head + b'{"model": ')
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close() if how == "close" else writer.transport.abort()
        await until(lambda: fleet.events.requests)

        assert [done.status for done in fleet.events.requests] == [499]
        assert [instance.calls for instance in fleet.instances] == [[], []]


HEAD_AND_MORE: Script = [read_request(), send(STREAM_HEAD + chunked(chunk("a"))), hold()]
HALF_AN_ANSWER: Script = [
    read_request(),
    send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"),
    hold(),
]
NOTHING: Script = [read_request(), hold()]


@pytest.mark.fault(43)
@pytest.mark.parametrize("script", [NOTHING, HALF_AN_ANSWER], ids=["waiting", "reading"])
async def test_a_client_that_leaves_in_encode_ends_every_encode(
    launch: Launch, script: Script
) -> None:
    async with (
        Scripted(script).running() as encode,
        launch(encode_servers_urls=(encode.url,)) as fleet,
    ):
        await leaves(fleet, encode, stream=False, calls=2)
        assert fleet.d.calls == []


@pytest.mark.fault(45)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script", [NOTHING, HALF_AN_ANSWER, HEAD_AND_MORE], ids=["waiting", "reading", "streaming"]
)
async def test_a_client_that_leaves_in_decode_ends_decode(
    launch: Launch, script: Script, stream: bool
) -> None:
    async with (
        Scripted(script).running() as decode,
        launch(decode_servers_urls=(decode.url,)) as fleet,
    ):
        await leaves(fleet, decode, stream=stream)
