"""Memory of a request's body: held until decode has answered, and no longer."""

import asyncio
import gc
import json
import re
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from epd.request.request import Request
from epd.server.app_keys import ADMISSION
from tests.requests import image, png, request, text
from tests.support.fake_instance import Handler, after, chunk, decodes, drops, hangs, refuses
from tests.support.fleet import Fleet, Launch, until
from tests.support.raw import connected, post

MB = 1024**2
PICTURE = b"p" * (3 * MB)
BODY_BYTES = 4 * MB
"""Size of the body, as base64."""


async def discards(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Discard a request as it is read, and begin a stream."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    if length is None:  # a probe
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    else:
        left = int(length[1])
        while left:
            left -= len(await reader.read(min(left, 65536)))
        event = chunk("a")
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(event), event)
        )
        await reader.read()  # until the proxy disconnects
    writer.close()


def holds(release: asyncio.Event) -> Handler:
    """Return a handler that streams one event, and the rest after the release."""

    async def chat(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(chunk("a"))
        await release.wait()
        await stream.write(b"data: [DONE]\n\n")
        return stream

    return chat


@asynccontextmanager
async def streams(fleet: Fleet, count: int) -> AsyncIterator[list[int]]:
    """Keep `count` streams in progress, each with its own picture; yield their statuses."""
    release = asyncio.Event()
    fleet.d.chat = holds(release)
    async with AsyncExitStack() as stack:
        statuses = []
        for number in range(count):
            body = request(text(), image(PICTURE + b"%06d" % number), stream=True)
            reply = await stack.enter_async_context(fleet.post(body))
            statuses.append(reply.status)
            await reply.content.readany()
            for instance in fleet.instances:
                instance.calls.clear()
        yield statuses
        release.set()


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


UNREACHABLE = ("http://127.0.0.1:9",)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("config", "role", "fault", "status"),
    [
        ({"max_image_pixels": 1}, "e", None, 400),
        ({"on_encode_failure": "fail"}, "e", refuses(500), 502),
        ({"on_encode_failure": "fail"}, "e", drops, 502),
        ({"on_encode_failure": "fail", "encode_servers_urls": UNREACHABLE}, "e", None, 503),
        ({"on_encode_failure": "fail", "encode_timeout_s": 0.2}, "e", hangs, 504),
        ({}, "e", drops, 200),
        ({"encode": 2}, "e", drops, 200),
        ({"encode_balance": "least_load"}, "e", drops, 200),
        ({"prefill": 1}, "p", drops, 200),
        ({"prefill": 2}, "p", drops, 200),
        ({}, "d", refuses(500), 500),
        ({}, "d", drops, 502),
        ({"decode_servers_urls": UNREACHABLE}, "d", None, 502),
        ({"decode": 2}, "d", drops, 200),
    ],
)
async def test_failed_requests_leave_no_reference_cycles(
    launch: Launch, config: dict[str, Any], role: str, fault: Handler | None, status: int
) -> None:
    """The body of a request in a cycle would remain until a garbage collection."""
    others = requests()  # of other tests in this process, such as their parameters
    async with launch(**config) as fleet:
        if fault is not None:
            getattr(fleet, role).chat = fault
        for number in range(4):
            picture = image(png(9, 9) + b"%d" % number)
            assert (await fleet.chat(request(picture)))[0] == status
        # The client's connection holds the last one.
        await until(lambda: requests() <= others + 1)


@pytest.mark.usefixtures("uncollected")
async def test_items_rejected_at_the_same_time_leave_no_reference_cycles(launch: Launch) -> None:
    others = requests()
    async with launch() as fleet:
        fleet.e.chat = refuses(400)
        for number in range(4):
            pictures = [image(png(9, 9) + b"%d %d" % (number, place)) for place in range(4)]
            assert (await fleet.chat(request(*pictures)))[0] == 400
        await until(lambda: requests() <= others + 1)


def requests() -> int:
    # `isinstance` would read `__class__` of proxy objects, which may import or warn.
    return sum(type(one) is Request for one in gc.get_objects())


@pytest.mark.parametrize("topology", [(1, 0, 1), (1, 1, 1)])
async def test_streams_under_way_leave_room_for_more_bodies(
    launch: Launch, topology: tuple[int, int, int]
) -> None:
    async with launch(*topology, max_inflight_bytes=10 * MB) as fleet, streams(fleet, 6) as said:
        assert said == [200] * 6
        assert fleet.runner.app[ADMISSION].body_bytes == 0


@pytest.mark.usefixtures("traced")
async def test_streams_under_way_keep_no_body_in_memory(launch: Launch) -> None:
    async with launch(1, 0, 1) as fleet:
        kept = dict[int, int]()
        for count in (2, 6):
            async with streams(fleet, count) as said:
                assert said == [200] * count
                gc.collect()
                kept[count] = tracemalloc.get_traced_memory()[0]

    assert kept[6] - kept[2] < BODY_BYTES


@pytest.mark.usefixtures("traced")
async def test_streams_of_requests_sent_with_their_media_keep_none_in_memory(
    launch: Launch,
) -> None:
    server = await asyncio.start_server(discards, "127.0.0.1", 0)
    url = "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
    config: Any = {"encode_servers_urls": (), "decode_servers_urls": (url,)}
    kept = []
    async with server, launch(encode=0, **config) as fleet, AsyncExitStack() as stack:
        for _ in range(2):
            for number in range(4):
                body = request(text(), image(PICTURE + b"%06d" % number), stream=True)
                reply = await stack.enter_async_context(fleet.post(body))
                assert reply.status == 200
                await reply.content.readany()
            gc.collect()
            kept.append(tracemalloc.get_traced_memory()[0])

    assert kept[1] - kept[0] < BODY_BYTES


@asynccontextmanager
async def waiting(fleet: Fleet, count: int) -> AsyncIterator[list[bytes]]:
    """Keep `count` requests without a stream at decode.

    At the end of the context decode answers them, and the list gets their statuses. The client
    keeps no body in memory.
    """
    answers, statuses = asyncio.Event(), list[bytes]()

    for instance in fleet.decode:
        instance.chat = after(answers, decodes)
    async with AsyncExitStack() as stack:
        readers = []
        for number in range(count):
            reader, writer = await stack.enter_async_context(connected(fleet.url))
            body = request(text(), image(PICTURE + b"%06d" % number))
            writer.write(post(json.dumps(body).encode()))
            readers.append(reader)
            del body
            await until(lambda: sum(one.open for one in fleet.decode) == len(readers))
            for instance in fleet.instances:
                instance.calls.clear()
        yield statuses
        answers.set()
        statuses += [(await reader.readline()).split()[1] for reader in readers]


async def test_a_body_counts_until_decode_has_answered(launch: Launch) -> None:
    async with launch(max_inflight_bytes=10 * MB) as fleet:
        admission = fleet.runner.app[ADMISSION]
        async with waiting(fleet, 2) as statuses:
            assert 2 * BODY_BYTES < admission.body_bytes < 2.1 * BODY_BYTES
            async with fleet.post(request(text(), image(PICTURE))) as third:
                assert third.status == 503

        assert statuses == [b"200"] * 2
        assert admission.body_bytes == 0
