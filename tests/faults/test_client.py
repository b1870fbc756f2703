"""HTTP client for instances: timeouts, limits, and reuse of connections."""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import uvloop

from epd.http.addresses import Addresses
from epd.http.connection import (
    DEAD_HOST_S,
    JOINED_BYTES,
    PIECE_BYTES,
    PROBE_IDLE_S,
    PROBE_INTERVAL_S,
    READ_BUFFER_BYTES,
    Broken,
    Connection,
    Unreachable,
)
from epd.http.http1 import Origin, request_head, target_of
from epd.http.pool import Pool
from tests.faults.scripted import (
    STREAM_HEAD,
    Exchange,
    Script,
    Scripted,
    Step,
    answer,
    chunked,
    close,
    hold,
    read_bytes,
    read_head,
    read_request,
    reset,
    send,
    send_endlessly,
    send_slowly,
    wait,
    wait_for,
)
from tests.requests import request, text
from tests.support.fleet import Launch, until
from tests.support.system_names import SystemNames

LONG_S = 20.0
KEPT = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def pooling(
    keep_alive_s: float = LONG_S, connect_timeout_s: float = LONG_S
) -> AsyncIterator[Pool]:
    tls = ssl.create_default_context()
    pool = Pool(tls, connect_timeout_s=connect_timeout_s, keep_alive_s=keep_alive_s)
    try:
        yield pool
    finally:
        await pool.close()


class Asking:
    """Connection pool and a scripted server."""

    def __init__(self, pool: Pool, server: Scripted) -> None:
        self.pool = pool
        self.server = server
        self.target = target_of(server.url + "/x")
        self.connections: list[Connection] = []

    @property
    def origin(self) -> Origin:
        return self.target.origin

    async def ask(self, body: bytes = b"{}", timeout_s: float = LONG_S) -> Connection:
        connection = self.pool.take_connection(self.origin) or await self.pool.connect(self.origin)
        self.connections.append(connection)
        await connection.send_request(
            request_head(self.target, {}, len(body)), (body,), in_s(timeout_s)
        )
        return connection

    async def read(self) -> bytes:
        connection = await self.ask()
        body = b"".join([piece async for piece in pieces(connection)])
        self.pool.give_back(connection)
        return body


def in_s(delay_s: float) -> float:
    return asyncio.get_running_loop().time() + delay_s


async def pieces(connection: Connection, idle_s: float = LONG_S) -> AsyncIterator[bytes]:
    while piece := await connection.chunk(in_s(idle_s)):
        yield piece


class Pieces(list[bytes]):
    """Received pieces of a body.

    Attributes:
        room: whether `take` accepts more.
    """

    room = True

    def take(self, piece: bytes) -> bool:
        self.append(piece)
        return self.room


async def read_into(got: Pieces, connection: Connection, idle_s: float) -> None:
    async for piece in pieces(connection, idle_s):
        got.append(piece)


@asynccontextmanager
async def asking(*scripts: Script, keep_alive_s: float = LONG_S) -> AsyncIterator[Asking]:
    async with Scripted(*scripts).running() as server, pooling(keep_alive_s) as pool:
        here = Asking(pool, server)
        yield here
        for connection in here.connections:
            connection.abort()


async def test_a_connection_is_used_again() -> None:
    script = [read_request(), send(answer(b"1")), read_request(), send(answer(b"2")), hold()]
    async with asking(script) as here:
        assert [await here.read(), await here.read()] == [b"1", b"2"]
        assert len(here.server.exchanges) == 1


async def test_concurrent_requests_open_separate_connections() -> None:
    async with asking([read_request(), send(answer(b"1")), hold()]) as here:
        await asyncio.gather(here.ask(), here.ask())

        assert len(here.server.exchanges) == 2


@pytest.mark.parametrize(
    "more",
    [send(b"HTTP/1.1 200 OK\r\n"), close(), reset(), wait(0.5)],
    ids=["sends data", "closes", "resets", "idles too long"],
)
async def test_an_idle_connection_is_not_kept_when_it(more: Step) -> None:
    script = [read_request(), send(answer(b"1")), wait(0.05), more, hold()]
    async with asking(script, keep_alive_s=0.2) as here:
        await here.read()
        await until(lambda: here.server.exchanges[0].left or here.server.exchanges[0].done)
        await asyncio.sleep(0.05)

        assert here.pool.take_connection(here.origin) is None


@pytest.mark.parametrize(
    "begun",
    [
        STREAM_HEAD + chunked(b"data: 1\n\n"),
        answer(b"{", length=10),
        answer(b"{}").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1),
    ],
    ids=["chunked", "content-length", "connection-close"],
)
async def test_an_incomplete_answer_ends_its_connection(begun: bytes) -> None:
    async with asking([read_request(), send(begun), hold()]) as here:
        here.pool.give_back(await here.ask())

        assert here.pool.take_connection(here.origin) is None
        await until(lambda: here.server.aborted)


async def test_an_unread_answer_ends_its_connection() -> None:
    """A reused connection would not read its next response either."""
    script = [read_request(), send(answer(b"x" * (READ_BUFFER_BYTES + 1))), hold()]
    async with asking(script) as here:
        connection = await here.ask()
        await until(lambda: not connection.is_usable)
        here.pool.give_back(connection)

        assert here.pool.take_connection(here.origin) is None


async def test_a_closed_pool_keeps_nothing() -> None:
    async with asking([read_request(), send(answer(b"1")), hold()]) as here:
        idle, busy = await here.ask(), await here.ask()
        here.pool.give_back(idle)
        await here.pool.close()
        here.pool.give_back(busy)

        assert here.pool.take_connection(here.origin) is None
        await until(lambda: here.server.aborted == 2)


async def test_a_port_without_a_listener_is_unreachable() -> None:
    async with pooling() as pool:
        for url in ("http://127.0.0.1:1", "http://localhost:1", "http://nobody.invalid:1"):
            with pytest.raises(Unreachable) as raised:
                await pool.connect(target_of(url).origin)
            assert isinstance(raised.value.__cause__, OSError)
        for url in ("http://a..b:1", f"http://{'a' * 64}.test:1"):  # invalid names
            with pytest.raises(Unreachable):
                await pool.connect(target_of(url).origin)


async def test_a_name_is_looked_up_once_for_all(system: SystemNames) -> None:
    async with asking([read_request(), send(answer(b"1")), hold()]) as here:
        origin = Origin("engine.test", here.origin.port, tls=False, is_name=True)
        here.connections += await asyncio.gather(*(here.pool.connect(origin) for _ in range(5)))
        here.connections.append(await here.pool.connect(origin))

        assert system.asked == ["engine.test"]


@pytest.mark.usefixtures("system")
async def test_an_unused_host_name_is_dropped_from_the_address_cache() -> None:
    addresses, kept = Addresses(), []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        for kept_s in (60.0, 0.0):
            addresses.unused_s = kept_s
            for number in range(4):
                name, port = f"engine-{kept_s}-{number}.test", server.sockets[0].getsockname()[1]
                with await addresses.connect(name, port):
                    kept.append(len(addresses))
    await addresses.close()

    assert kept == [1, 2, 3, 4, 3, 2, 1, 1]


async def test_the_dot_at_the_end_of_a_name_is_looked_up(system: SystemNames) -> None:
    """Without the dot, the resolver may find the name below a search domain."""
    system.error = socket.EAI_NONAME
    async with pooling() as pool:
        with pytest.raises(Unreachable):
            await pool.connect(target_of("http://engine.test.:1").origin)

    assert system.asked == ["engine.test."]


async def test_each_address_of_a_name_has_its_turn(system: SystemNames) -> None:
    system.addresses["engine.test"] = ("127.0.0.1", "127.0.0.2")
    seen = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("sockname")[0])
        writer.close()

    server = await asyncio.start_server(serve, "0.0.0.0", 0)  # noqa: S104 - two loopback addresses
    origin = Origin("engine.test", server.sockets[0].getsockname()[1], tls=False, is_name=True)
    async with server, pooling() as pool:
        for number in range(4):
            (await pool.connect(origin)).abort()
            await until(lambda: len(seen) > number)  # noqa: B023 - called at once

    assert seen == ["127.0.0.1", "127.0.0.2"] * 2


@pytest.mark.parametrize(
    ("connect_s", "request_s", "failure"),
    [(0.2, 1000, Unreachable), (1000, 0.2, TimeoutError)],
)
async def test_a_connection_is_made_in_time_for_itself_and_for_its_request(
    connect_s: float, request_s: float, failure: type[Exception]
) -> None:
    """The host accepts the connection, and never answers the TLS handshake."""
    async with (
        Scripted([hold()]).running() as server,
        pooling(connect_timeout_s=connect_s) as pool,
    ):
        origin = Origin("127.0.0.1", target_of(server.url).origin.port, tls=True, is_name=False)
        with pytest.raises(failure):
            async with asyncio.timeout(LONG_S) as limit:
                await pool.connect(origin, in_s(request_s))
        assert not limit.expired()


async def test_connections_have_keep_alive_probes_for_dead_hosts() -> None:
    async with asking([hold()]) as here:
        transport, connection = await asyncio.get_running_loop().create_connection(
            partial(Connection, here.origin), here.origin.host, here.origin.port
        )
        here.connections.append(connection)
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as opened:
            assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == PROBE_IDLE_S
            probed_s = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            dead_ms = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    assert (probed_s, dead_ms) == (PROBE_INTERVAL_S, DEAD_HOST_S * 1000)


@pytest.mark.parametrize("size", [1, JOINED_BYTES, JOINED_BYTES + 1, PIECE_BYTES, PIECE_BYTES + 1])
async def test_a_body_of_pieces_is_sent_whole(size: int) -> None:
    body = bytes(at % 251 for at in range(size))
    parts = (body[:7], memoryview(body)[7:-3], body[max(7, size - 3) :])
    script = [read_head(), read_bytes(size), send(answer(b"1")), hold()]
    async with asking(script) as here:
        connection = await here.pool.connect(here.origin)
        here.connections.append(connection)
        await connection.send_request(request_head(here.target, {}, size), parts, in_s(LONG_S))

    assert here.server.exchanges[0].body == body


async def test_silence_ends_a_wait_and_a_trickle_does_not() -> None:
    slow = send_slowly(chunked(b"0123456789"), 0.05)
    async with asking([read_request(), send(STREAM_HEAD), slow, hold()]) as here:
        connection = await here.ask()
        got = Pieces()
        with pytest.raises(TimeoutError):
            await read_into(got, connection, idle_s=0.4)

    assert b"".join(got) == b"0123456789"


async def test_a_trickling_head_times_out() -> None:
    async with asking([read_request(), send_slowly(STREAM_HEAD, 0.02), hold()]) as here:
        with pytest.raises(TimeoutError):
            await here.ask(timeout_s=0.3)


async def test_a_wait_ends_at_its_own_deadline_after_a_longer_one() -> None:
    script = [read_request(), send(STREAM_HEAD + chunked(b"1")), hold()]
    async with asking(script) as here:
        connection = await here.ask(timeout_s=1000)
        await connection.chunk(in_s(1000))
        async with asyncio.timeout(LONG_S):
            with pytest.raises(TimeoutError):
                await connection.chunk(in_s(0.1))


@pytest.mark.parametrize("end", [close(), reset()], ids=["closed", "reset"])
async def test_bytes_before_the_end_of_a_connection_are_relayed(end: Step) -> None:
    script = [read_request(), send(STREAM_HEAD + chunked(b"1", b"2")), wait(0.1), end]
    async with asking(script) as here:
        connection = await here.ask()
        await asyncio.sleep(0.3)
        assert await connection.chunk(in_s(LONG_S)) == b"12"
        with pytest.raises(Broken):
            await connection.chunk(in_s(LONG_S))


async def test_an_unread_body_is_not_read_from_the_socket() -> None:
    sent = 0

    def count() -> Step:
        async def step(at: Exchange) -> None:
            nonlocal sent
            while True:
                at.writer.write(chunked(b"x" * 65536))
                await at.writer.drain()
                sent += 65536

        return step

    async with asking([read_request(), send(STREAM_HEAD), count()]) as here:
        connection = await here.ask()
        before = -1
        while sent > before:
            before = sent
            await asyncio.sleep(0.3)
        taken = len(await connection.chunk(in_s(LONG_S)))
        assert READ_BUFFER_BYTES <= taken < sent
        while taken <= before:  # the stream goes on
            taken += len(await connection.chunk(in_s(LONG_S)))


async def test_a_large_body_waits_until_it_is_taken() -> None:
    body = b"0123456789" * (4 * PIECE_BYTES)
    go = asyncio.Event()
    script = [read_head(), wait_for(go), read_bytes(len(body)), send(answer(b"1")), hold()]
    async with asking(script) as here:
        asked = asyncio.create_task(here.ask(body))
        await asyncio.sleep(0.2)
        assert not asked.done()
        go.set()
        connection = await asked

        assert here.server.exchanges[0].body == body
        here.pool.give_back(connection)
        assert here.pool.take_connection(here.origin) is connection


async def test_an_instance_that_reads_no_body_times_out() -> None:
    async with asking([read_head(), wait(LONG_S)]) as here:
        with pytest.raises(TimeoutError):
            await here.ask(b"x" * 64 * PIECE_BYTES, timeout_s=0.3)


@pytest.mark.parametrize("length", [2, 100], ids=["complete", "incomplete"])
async def test_connection_stops_sending_a_body_after_a_rejection(length: int) -> None:
    body = b"x" * 64 * PIECE_BYTES
    got = 0

    async def count(at: Exchange) -> None:
        nonlocal got
        while piece := await at.reader.read(65536):
            got += len(piece)

    rejection = answer(b"no", 413, length=length)
    async with asking([read_head(), send(rejection), wait(0.2), count]) as here:
        connection = await here.ask(body)
        assert (connection.reply.status, await connection.chunk(in_s(LONG_S))) == (413, b"no")
        await asyncio.sleep(0.5)
        assert not connection.is_usable
        here.pool.give_back(connection)
        await until(lambda: here.server.exchanges[0].done or here.server.aborted)
    assert got < len(body)


async def test_a_body_is_poured_until_its_end() -> None:
    script = [
        read_request(),
        send(KEPT + chunked(b"1")),
        *(step for piece in (b"2", b"3") for step in (wait(0.05), send(chunked(piece)))),
        send(b"0\r\n\r\n"),
        hold(),
    ]
    async with asking(script) as here:
        connection = await here.ask()
        got = Pieces()
        assert await connection.pour_body(got.take, LONG_S)

        assert b"".join(got) == b"123"
        assert connection.is_usable


async def test_a_full_sink_receives_no_more_bytes() -> None:
    go = asyncio.Event()
    script = [
        read_request(),
        send(KEPT + chunked(b"1")),
        wait_for(go),
        send(chunked(b"2")),
        wait(0.1),
        send(chunked(b"3") + b"0\r\n\r\n"),
        hold(),
    ]
    async with asking(script) as here:
        connection = await here.ask()
        got = Pieces()
        got.room = False
        assert not await connection.pour_body(got.take, LONG_S)
        go.set()
        await asyncio.sleep(0.3)
        assert got == [b"1"]

        rest = b""
        while len(rest) < 2:
            rest += await connection.chunk(in_s(LONG_S))
        assert rest == b"23"
        assert await connection.pour_body(got.take, LONG_S)
        assert got == [b"1"]


@pytest.mark.parametrize(
    ("then", "error"),
    [
        ([close()], Broken),
        ([reset()], Broken),
        ([send(b"nonsense"), hold()], Broken),
        ([hold()], TimeoutError),
    ],
    ids=["closed", "reset", "malformed", "silent"],
)
async def test_pour_body_raises_if_the_connection_breaks(
    then: list[Step], error: type[Exception]
) -> None:
    script = [read_request(), send(KEPT + chunked(b"1")), wait(0.1), *then]
    async with asking(script) as here:
        connection = await here.ask()
        got = Pieces()
        with pytest.raises(error):
            await connection.pour_body(got.take, 0.5)
        assert got == [b"1"]


async def test_pour_body_continues_while_bytes_arrive() -> None:
    trickle = [step for _ in range(8) for step in (wait(0.1), send(chunked(b"x")))]
    async with asking([read_request(), send(KEPT), *trickle, hold()]) as here:
        connection = await here.ask()
        got = Pieces()
        with pytest.raises(TimeoutError):
            await connection.pour_body(got.take, 0.5)
        assert got == [b"x"] * 8


async def test_a_cancelled_pour_sends_nothing_more_to_its_sink() -> None:
    script = [read_request(), send(KEPT), send_endlessly(chunked(b"x" * 65536))]
    async with asking(script) as here:
        connection = await here.ask()
        got = Pieces()
        pouring = asyncio.create_task(connection.pour_body(got.take, LONG_S))
        await until(lambda: got)
        pouring.cancel()
        await asyncio.wait([pouring])
        count = len(got)
        await asyncio.sleep(0.1)
        assert len(got) == count
        here.pool.give_back(connection)
        await until(lambda: here.server.aborted)


@pytest.mark.parametrize(("coding", "status"), [("gzip", 502), ("br", 502), ("Identity", 200)])
async def test_an_encoding_that_was_not_asked_for_is_refused(
    launch: Launch, coding: str, status: int
) -> None:
    encoded = answer(b"{}").replace(
        b"\r\n\r\n", b"\r\nContent-Encoding: %b\r\n\r\n" % coding.encode(), 1
    )
    async with (
        Scripted([read_request(), send(encoded), hold()]).running() as decoder,
        launch(decode_servers_urls=(decoder.url,)) as fleet,
        fleet.post(request(text())) as reply,
    ):
        assert reply.status == status
        assert reply.headers.get("x-epd-error") == (
            None if status == 200 else "decode_bad_response"
        )


@pytest.mark.fault(85)
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_connection_made_during_a_stall_of_the_process_is_not_late(name: str) -> None:
    """The loop of the proxy, uvloop, runs timers before it looks at sockets."""

    async def connect(port: int) -> None:
        async with pooling(connect_timeout_s=0.3) as pool:
            origin = Origin(name, port, tls=False, is_name=name == "localhost")
            (await pool.connect(origin)).abort()  # the name is known from now on
            connecting = asyncio.create_task(pool.connect(origin))
            await asyncio.sleep(0)
            time.sleep(0.6)  # noqa: ASYNC251 - the stall
            (await connecting).abort()

    with socket.create_server(("127.0.0.1", 0)) as server:
        uvloop.run(connect(server.getsockname()[1]))
