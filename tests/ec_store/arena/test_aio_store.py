"""The event loop's client of an arena: order, cancelled calls, and servers that fail or lie."""

import asyncio
import gc
import multiprocessing
import re
import signal
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from ec_store import Entry, EntryKey
from ec_store.arena import aio_connection
from ec_store.arena.aio_connection import AsyncArenaConnection, UnixEndpoint
from ec_store.arena.aio_store import AsyncArenaStore
from ec_store.arena.protocol import (
    LENGTH_BYTES,
    Done,
    Failed,
    Find,
    Frames,
    GetStats,
    Headers,
    Hello,
    Welcome,
    encode,
    read_request,
)
from ec_store.arena.server import ArenaServer
from ec_store.arena.store import ArenaStore
from ec_store.arena.url import ArenaOptions
from ec_store.errors import StoreUnavailable
from ec_store.testing.stores import entry, key, sized
from tests.ec_store.arena.served import Serve

WELCOME = encode(Welcome(b"", 1, 0, 0))
CHECKED = encode(Headers([]))
"""Reply to `check`."""
KEYS = [key(str(n)) for n in range(8)]

Scenario = Callable[..., Coroutine[Any, Any, None]]


@asynccontextmanager
async def opened(path: Path, timeout_s: float = 10) -> AsyncIterator[AsyncArenaStore]:
    """Open a store; it must leave no socket open."""
    store = AsyncArenaStore.from_options(ArenaOptions(str(path), timeout_s=timeout_s))
    try:
        yield store
    finally:
        await store.close()
    left = store._connection._socket  # noqa: SLF001
    assert left is None or left.fileno() == -1


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process or thread makes true."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - they set no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def scripted(path: Path, *answers: bytes) -> AsyncIterator[list[int]]:
    """Answer the n-th request of each connection with the n-th bytes, and then close it.

    Yields:
        The number of connections so far, in a list.
    """
    connections = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[0] += 1
        frames, left = Frames(2**20), iter(answers)
        while data := await reader.read(2**16):
            for _ in frames.split(data):
                answer = next(left, None)
                if answer is None:
                    writer.close()
                    return
                writer.write(answer)
        writer.close()

    listening = await asyncio.start_unix_server(serve, path)
    async with listening:
        yield connections


def length(size: int) -> bytes:
    return size.to_bytes(LENGTH_BYTES, "little")


async def answers(store: AsyncArenaStore) -> None:
    """Wait until the store's server answers."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await store.check()
            except StoreUnavailable:
                await asyncio.sleep(0.02)


async def test_concurrent_calls_get_their_own_replies(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    for n, each in enumerate(KEYS):
        store.put(each, sized(2 * (n + 1)))
    async with opened(path) as aio:
        calls = [(n, aio.lookup([KEYS[n % 8], key("none")])) for n in range(500)]
        found = await asyncio.gather(*(call for _, call in calls))

    assert [infos[0] and infos[0].key for infos in found] == [KEYS[n % 8] for n in range(500)]
    assert {infos[1] for infos in found} == {None}


async def test_calls_of_one_connection_are_one_connection(path: Path, server: ArenaServer) -> None:
    async with opened(path) as aio:
        await asyncio.gather(*(aio.lookup(KEYS) for _ in range(20)))
        other = AsyncArenaConnection(UnixEndpoint(str(path)), 10)
        stats = await other.call(GetStats())
        await other.close()

    assert stats.memory.clients == 2


async def test_the_reply_to_a_cancelled_call_is_dropped_in_its_turn(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    store.put(KEYS[0], sized(2))
    async with opened(path) as aio:
        await aio.check()
        for _ in range(50):
            left = asyncio.create_task(aio.lookup([KEYS[1]]))
            await asyncio.sleep(0)
            left.cancel()
            [found] = await aio.lookup([KEYS[0]])
            assert found is not None
            assert left.cancelled()


async def test_many_long_replies_do_not_end_the_connection(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    keys = [key(str(n)) for n in range(64)]
    for each in keys:
        store.put(each, entry(metadata={"grid": "x" * 40_000}))
    async with opened(path) as aio:
        found = await asyncio.gather(*(aio.lookup(keys) for _ in range(20)))

    assert all(info is not None for infos in found for info in infos)


async def test_calls_leave_nothing_behind(
    path: Path, server: ArenaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures: weakref.WeakSet[asyncio.Future[object]] = weakref.WeakSet()
    ask = aio_connection._Link.ask  # noqa: SLF001

    def noted(*args: object) -> object:
        futures.add(future := ask(*args))  # type: ignore[arg-type]
        return future

    monkeypatch.setattr(aio_connection._Link, "ask", noted)  # noqa: SLF001
    async with opened(path) as aio:
        for n in range(100):
            calls = [asyncio.create_task(aio.lookup(KEYS[:1])) for _ in range(100)]
            await asyncio.sleep(0)
            calls[n].cancel()
            await asyncio.wait(calls)
        await aio.check()
        await asyncio.sleep(0)
        link = aio._connection._link  # noqa: SLF001
        del calls
        gc.collect()

        assert link is not None
        assert not link._calls  # noqa: SLF001
        assert not futures


async def failure(store: AsyncArenaStore) -> str:
    """Return the error of a call; empty: it has not failed."""
    try:
        await store.check()
    except StoreUnavailable as error:
        return str(error)
    return ""


UNUSABLE: dict[str, tuple[tuple[bytes, ...], str]] = {
    "no welcome": ((), "closed the connection"),
    "garbage for a welcome": ((length(3) + b"abc",), "malformed|MessagePack|Expected|truncated"),
    "another reply for a welcome": ((CHECKED,), "an unexpected reply"),
    "another version": (
        (encode(Failed("it speaks version 9")),),
        "sock: it speaks version 9$",
    ),
    "closed": ((WELCOME,), "closed the connection"),
    "half a length": ((WELCOME, b"\x05"), "no reply within"),
    "half a reply": ((WELCOME, CHECKED[:-3]), "no reply within"),
    "half a reply, and the end": ((WELCOME, CHECKED[:-3], b""), "no reply within"),
    "garbage": ((WELCOME, length(4) + b"\xc1\xc1\xc1\xc1"), "malformed|MessagePack|Invalid|trunc"),
    "too long": ((WELCOME, length(2**31)), "a message of 2147483652 bytes"),
    "too nested": ((WELCOME, length(60_000) + b"\x91" * 60_000), "."),
    "another reply": ((WELCOME, encode(Done())), "an unexpected reply"),
    "a failure": ((WELCOME, encode(Failed("it is full"))), "sock: it is full$"),
}


@pytest.mark.fault(112)
@pytest.mark.parametrize("how", UNUSABLE)
async def test_an_unusable_reply_fails_calls_and_ends_the_connection(path: Path, how: str) -> None:
    replies, problem = UNUSABLE[how]
    async with scripted(path, *replies) as connections, opened(path, timeout_s=0.2) as aio:
        for connection in (1, 2):
            failed = await failure(aio)
            assert re.search(problem, failed), failed
            assert str(path) in failed
            assert connections == [connection]
            aio._connection._again_s = 0  # noqa: SLF001 - the next call connects at once


@pytest.mark.fault(112)
async def test_a_reply_without_a_request_ends_the_connection(path: Path) -> None:
    async with scripted(path, WELCOME, CHECKED + CHECKED) as connections, opened(path) as aio:
        await aio.check()
        await aio.check()

        assert connections == [2]


@pytest.mark.fault(112)
@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_reply_for_other_keys_is_refused(path: Path, count: int) -> None:
    reply = encode(Headers([b""] * count))
    async with scripted(path, WELCOME, reply) as _, opened(path) as aio:
        with pytest.raises(StoreUnavailable, match=f"answers {count} of 2 keys"):
            await aio.lookup(KEYS[:2])


@pytest.mark.parametrize("there", [False, True])
async def test_a_path_without_a_server_is_unavailable(path: Path, there: bool) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        if there:
            left.bind(str(path))
        async with opened(path) as aio:
            with pytest.raises(StoreUnavailable, match=str(path)):
                await aio.lookup(KEYS)


async def test_a_socket_that_every_user_may_replace_is_not_used(
    path: Path, server: ArenaServer
) -> None:
    path.parent.chmod(0o777)
    async with opened(path) as aio:
        with pytest.raises(StoreUnavailable, match="every user may write to"):
            await aio.check()


async def test_calls_to_a_failing_server_make_few_connections(path: Path) -> None:
    client = AsyncArenaConnection(UnixEndpoint(str(path)), 10, connect_every_s=3600.0)
    async with scripted(path) as connections:
        for _ in range(2):
            calls = (client.call(GetStats()) for _ in range(100))
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(each) for each in failed} == {StoreUnavailable}
        await client.close()

    assert connections == [1]


@pytest.mark.fault(113)
async def test_a_stopped_server_fails_calls_in_time_and_is_used_again(path: Path) -> None:
    with Serve(path) as child:
        async with opened(path, timeout_s=0.3) as aio:
            await answers(aio)
            assert await aio.claim(KEYS, "one", 60) == [True] * 8
            child.signal(signal.SIGSTOP)
            async with asyncio.timeout(20):
                for _ in range(3):  # the connection, then new ones
                    calls = [aio.lookup(KEYS), aio.claim(KEYS, "other", 60), aio.check()]
                    failed = await asyncio.gather(*calls, return_exceptions=True)
                    assert {type(each) for each in failed} == {StoreUnavailable}
                    await asyncio.sleep(aio_connection.CONNECT_EVERY_S)
            child.signal(signal.SIGCONT)
            await answers(aio)

            # What was claimed by the first connection, or by an unanswered message, is free.
            assert await aio.claim(KEYS, "third", 60) == [True] * 8


async def test_a_reply_that_came_while_the_loop_was_busy_is_in_time(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    async with opened(path, timeout_s=0.1) as aio:
        await aio.check()
        calls = [asyncio.create_task(aio.lookup(KEYS)) for _ in range(3)]
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251 - as a busy loop does

        assert await asyncio.gather(*calls) == [[None] * 8] * 3


@pytest.mark.fault(112)
async def test_a_server_killed_in_the_middle_of_calls_is_replaced(path: Path) -> None:
    with Serve(path) as child:
        async with opened(path) as aio:
            await answers(aio)
            child.signal(signal.SIGSTOP)
            calls = [asyncio.create_task(aio.claim(KEYS, "one", 60)) for _ in range(10)]
            await asyncio.sleep(0)
            child.kill()
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(each) for each in failed} == {StoreUnavailable}
            with Serve(path):
                await answers(aio)
                assert await aio.claim(KEYS, "one", 60) == [True] * 8


async def test_claims_end_with_the_store(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    async with opened(path) as aio:
        assert await aio.claim(KEYS, "gone", 60) == [True] * 8
        assert store.claim(KEYS, "other", 60) == [False] * 8

    await until(lambda: all(store.claim(KEYS, "other", 60)))


async def test_a_closed_store_fails_calls(path: Path, server: ArenaServer) -> None:
    async with scripted(path.with_name("other"), WELCOME, b"") as _:
        aio = AsyncArenaStore.from_options(ArenaOptions(str(path.with_name("other")), timeout_s=60))
        under_way = asyncio.create_task(aio.check())
        await until(lambda: aio._connection._link is not None)  # noqa: SLF001
        await asyncio.sleep(0)
        await aio.close()
        for call in (under_way, asyncio.ensure_future(aio.check())):
            with pytest.raises(StoreUnavailable):
                await call


async def test_a_store_closes_while_it_connects(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        async with opened(path, timeout_s=3600) as aio, asyncio.timeout(60):
            connecting = asyncio.create_task(aio.check())
            await until(lambda: aio._connection._socket is not None)  # noqa: SLF001
            await aio.close()
            with pytest.raises(StoreUnavailable):
                await connecting


async def test_a_fork_has_no_part_in_the_connection(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    """Claims end with the parent's connection, though a child of it lives on."""
    fork = multiprocessing.get_context("fork")
    forked, done = fork.Event(), fork.Event()

    def live() -> None:
        forked.set()
        done.wait(60)

    async with opened(path) as aio:
        assert await aio.claim(KEYS, "parent", 60) == [True] * 8
        child = fork.Process(target=live)
        child.start()
        assert await asyncio.to_thread(forked.wait, 60)
        assert await aio.claim(KEYS, "parent", 60) == [True] * 8
    try:
        await until(lambda: all(store.claim(KEYS, "other", 60)))
        assert child.is_alive()
    finally:
        done.set()
        await asyncio.to_thread(child.join)


async def test_a_name_is_written_without_the_memory(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    def name(meaning: str) -> Entry:
        return Entry(memoryview(b""), "F32", (0,), "image", {"key": meaning})

    async with opened(path) as aio:
        assert await aio.put(key(), name("a")) is True
        assert await aio.put(key(), name("b")) is False
        assert await aio.put(key(), name("c"), replace=True) is True
        [info] = await aio.lookup([key()])
        with pytest.raises(ValueError, match="payload"):
            await aio.put(key(), sized(2))

        assert info is not None
        assert info.metadata == {"key": "c"}
        read = store.get(key())
        assert read is not None
        assert read.metadata == {"key": "c"}


async def test_a_cancelled_write_of_a_name_leaves_nothing_begun(
    path: Path, server: ArenaServer, store: ArenaStore, caplog: pytest.LogCaptureFixture
) -> None:
    name = Entry(memoryview(b""), "F32", (0,), "image", {})
    clients = server.arena.clients
    async with opened(path) as aio:
        await aio.check()
        for each in KEYS:
            writing = asyncio.create_task(aio.put(each, name, replace=True))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            writing.cancel()
        await until(lambda: None not in store.lookup(KEYS))
        await until(lambda: not any(client.writes for client in list(clients.values())))
        # These fail after their callers have left.
        for each in KEYS:
            writing = asyncio.create_task(aio.put(each, name, replace=True))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            writing.cancel()
    await asyncio.sleep(0)
    gc.collect()

    assert "never retrieved" not in caplog.text


async def test_each_call_for_many_keys_is_one_message(path: Path) -> None:
    received: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = Frames(2**20)
        while data := await reader.read(2**16):
            for request in map(read_request, frames.split(data)):
                received.append(type(request).__name__)
                match request:
                    case Hello():
                        writer.write(WELCOME)
                    case Find(digests):
                        writer.write(encode(Headers([b""] * len(digests))))
                    case _:
                        writer.write(encode(Done()))
        writer.close()

    keys = [EntryKey("m", str(n)) for n in range(64)]
    async with await asyncio.start_unix_server(serve, path), opened(path) as aio:
        await aio.lookup(keys)
        await aio.lease(keys, 10)
        await aio.release(keys, "owner")
        await aio.delete(keys)

    assert received == ["Hello", "Find", "Find", "Release", "Delete"]


@pytest.mark.parametrize(
    "scenario",
    [
        test_concurrent_calls_get_their_own_replies,
        test_the_reply_to_a_cancelled_call_is_dropped_in_its_turn,
        test_many_long_replies_do_not_end_the_connection,
        test_a_reply_that_came_while_the_loop_was_busy_is_in_time,
        test_claims_end_with_the_store,
        test_a_fork_has_no_part_in_the_connection,
    ],
)
def test_calls_on_uvloop(
    path: Path, server: ArenaServer, store: ArenaStore, scenario: Scenario
) -> None:
    uvloop.run(scenario(path, server, store))


@pytest.mark.parametrize(
    "scenario",
    [
        test_a_stopped_server_fails_calls_in_time_and_is_used_again,
        test_a_server_killed_in_the_middle_of_calls_is_replaced,
        test_a_store_closes_while_it_connects,
    ],
)
def test_failures_on_uvloop(path: Path, scenario: Scenario) -> None:
    uvloop.run(scenario(path))


@pytest.mark.parametrize("how", UNUSABLE)
def test_unusable_replies_on_uvloop(path: Path, how: str) -> None:
    uvloop.run(test_an_unusable_reply_fails_calls_and_ends_the_connection(path, how))
