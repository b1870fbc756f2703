"""Answers without a stream that are too large to be held: they are relayed as they arrive."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from epd.request.stages import WHOLE_BYTES
from epd.server.app_keys import ADMISSION
from epd.server.whole_response import JOINED_BYTES
from tests.faults.scripted import Scripted, answer, chunked, hold, read_request, reset, send, wait
from tests.requests import request, text
from tests.support.fake_instance import Handler
from tests.support.fleet import Fleet, Launch, until
from tests.support.raw import connected, post

CONTENT = bytes(range(32, 127)) * (4 * WHOLE_BYTES // 95)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def says(content: bytes) -> Handler:
    async def chat(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.Response(body=content, content_type="application/json")

    return chat


@pytest.mark.parametrize(
    "size", [JOINED_BYTES, JOINED_BYTES + 1, WHOLE_BYTES, WHOLE_BYTES + 1, len(CONTENT)]
)
async def test_a_large_answer_arrives_unchanged_with_its_length(launch: Launch, size: int) -> None:
    async with launch() as fleet:
        fleet.d.chat = says(CONTENT[:size])
        for _ in range(2):  # on one connection
            async with fleet.post(request(text())) as reply:
                assert reply.status == 200
                assert reply.headers["Content-Type"] == "application/json"
                assert reply.content_length == size
                assert await reply.read() == CONTENT[:size]

        assert [event.answer_bytes for event in fleet.events.requests] == [size] * 2
        assert {(event.status, event.error) for event in fleet.events.requests} == {(200, None)}
        assert not any(event.stream for event in fleet.events.requests)
        assert fleet.runner.app[ADMISSION].body_bytes == 0


async def test_a_large_answer_without_a_length_arrives_in_chunks(launch: Launch) -> None:
    sent = HEAD + chunked(CONTENT, b"")
    async with (
        Scripted([read_request(), send(sent), hold()]).running() as decode,
        launch(decode_servers_urls=(decode.url,)) as fleet,
        fleet.post(request(text())) as reply,
    ):
        assert reply.headers["Transfer-Encoding"] == "chunked"
        assert await reply.read() == CONTENT


@pytest.mark.fault(37)
@pytest.mark.parametrize("length", [len(CONTENT) + 1, None])
async def test_a_large_answer_that_breaks_off_is_cut_off_for_the_client(
    launch: Launch, length: int | None
) -> None:
    sent = HEAD + chunked(CONTENT) if length is None else answer(CONTENT, length=length)
    script = [read_request(), send(sent), wait(0.1), reset()]
    async with (
        Scripted(script).running() as first,
        Scripted(script).running() as second,
        launch(decode_servers_urls=(first.url, second.url)) as fleet,
    ):
        with pytest.raises(aiohttp.ClientError):
            async with fleet.post(request(text())) as reply:
                await reply.read()

        await until(lambda: fleet.events.requests)
        [done] = fleet.events.requests
        assert (done.status, done.error) == (200, "decode_died")
        assert len(first.exchanges) + len(second.exchanges) == 1


@pytest.mark.fault(37)
async def test_an_answer_that_breaks_off_while_it_is_held_is_tried_again(launch: Launch) -> None:
    part = CONTENT[: WHOLE_BYTES // 2]
    script = [read_request(), send(answer(part, length=WHOLE_BYTES)), wait(0.1), reset()]
    async with (
        Scripted(script).running() as first,
        Scripted([read_request(), send(answer(part)), hold()]).running() as second,
        launch(decode_servers_urls=(first.url, second.url)) as fleet,
        fleet.post(request(text())) as reply,
    ):
        assert (reply.status, await reply.read()) == (200, part)
        assert fleet.runner.app[ADMISSION].body_bytes <= len(part)


async def test_the_deadline_of_a_request_cuts_a_large_answer_off(launch: Launch) -> None:
    script = [read_request(), send(answer(CONTENT, length=len(CONTENT) + 1)), hold()]
    async with (
        Scripted(script).running() as decode,
        launch(decode_servers_urls=(decode.url,)) as fleet,
    ):
        with pytest.raises(aiohttp.ClientError):
            async with fleet.post(request(text()), {"x-request-timeout": "1"}) as reply:
                await reply.read()

        await until(lambda: fleet.events.requests)
        assert [event.error for event in fleet.events.requests] == ["request_timeout"]


async def unread(fleet: Fleet, stack: AsyncExitStack, count: int) -> None:
    """Send requests, and read no answer."""
    for _ in range(count):
        reader, writer = await stack.enter_async_context(connected(fleet.url))
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # noqa: SLF001
        writer.write(post(b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'))


@pytest.mark.fault(46)
async def test_large_answers_that_clients_do_not_read_are_held_in_part_and_count(
    launch: Launch,
) -> None:
    sent = 0

    async def chat(asked: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        nonlocal sent
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await stream.prepare(asked)
        for _part in range(32):
            await stream.write(b"x" * WHOLE_BYTES)
            sent += 1
        return stream

    async with launch() as fleet, AsyncExitStack() as stack:
        fleet.d.chat = chat
        await unread(fleet, stack, 4)
        admission = fleet.runner.app[ADMISSION]
        await until(lambda: admission.body_bytes >= 4 * WHOLE_BYTES)
        before = -1
        while before < sent:  # until decode waits
            before = sent
            await asyncio.sleep(0.5)

        assert sent < 4 * 16  # buffers of the kernel included, of 4 * 32
        assert admission.body_bytes < 4 * 2 * WHOLE_BYTES


@pytest.mark.fault(46)
async def test_an_answer_without_room_is_relayed_and_not_refused(launch: Launch) -> None:
    async with launch(max_inflight_bytes=64 * 1024) as fleet:
        fleet.d.chat = says(CONTENT[: WHOLE_BYTES // 2])
        async with fleet.post(request(text())) as reply:
            assert (reply.status, await reply.read()) == (200, CONTENT[: WHOLE_BYTES // 2])
        assert fleet.runner.app[ADMISSION].refused == {}
