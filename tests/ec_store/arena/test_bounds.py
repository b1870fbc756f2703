"""Upper bounds of what a client, or a user, may take from the others, each at the bound."""

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import uvloop

from ec_store.arena import connection as connections
from ec_store.arena.aio_connection import AsyncArenaConnection, UnixEndpoint
from ec_store.arena.connection import ArenaConnection
from ec_store.arena.extents import PAGE_BYTES, ExtentAllocator
from ec_store.arena.index import ArenaIndex
from ec_store.arena.memory import create_memory, map_memory
from ec_store.arena.peers import Peer
from ec_store.arena.protocol import (
    MAX_KEYS,
    MAX_REQUEST_BYTES,
    VERSION,
    Begin,
    ClaimKeys,
    End,
    Failed,
    Find,
    GetStats,
    Hello,
    List,
    Read,
    Register,
    Stats,
    Unpin,
    Welcome,
    encode,
    read_reply,
)
from ec_store.arena.server import (
    DESCRIPTORS_EACH,
    MAX_REFUSED,
    OTHER_DESCRIPTORS,
    ArenaServer,
)
from ec_store.arena.sockets import bind, check_folder
from ec_store.arena.store import ArenaStore
from ec_store.errors import StoreUnavailable
from ec_store.testing.stores import key, sized
from tests.ec_store.arena.served import MIB, Serve, opened, raw, serving, stats, until

HELLO = encode(Hello(VERSION, "writer"))


@pytest.fixture
def server(path: Path) -> Iterator[ArenaServer]:
    with serving(path, 8 * MIB, client_bytes=2 * MIB) as server:
        yield server


@pytest.fixture
def client(path: Path, server: ArenaServer) -> Iterator[ArenaConnection]:
    with closing(ArenaConnection(str(path), "writer", 10)) as client:
        yield client


def silent(path: Path) -> socket.socket:
    """Return a connection that sends nothing."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(path))
    return connection


def text_of(replies: list[bytes]) -> str:
    reply = read_reply(replies[-1])
    assert isinstance(reply, Failed), reply
    return reply.text


def stats_of(store: ArenaStore) -> Stats:
    return store._ask(GetStats())  # noqa: SLF001


def committed(client: ArenaConnection, name: str, header: bytes = b"x", size: int = MIB) -> bytes:
    """Commit an entry of this header; return its digest."""
    digest = bytes.fromhex(key(name).digest)
    begun, arena = client.call(Begin(digest, b"", size, False))
    assert begun.number, begun
    assert client.call(End(begun.number, header), within=arena)[0].number == 1
    return digest


@pytest.mark.fault(123)
def test_silent_connections_count_and_a_full_table_refuses_with_a_reason(path: Path) -> None:
    with serving(path, max_connections=8), ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(silent(path))
        client = stack.enter_context(opened(path))
        assert client.lookup([key()]) == [None]
        for call in (lambda: stats(path), lambda: raw(path, HELLO)):
            try:
                text = text_of(call())  # type: ignore[arg-type]
            except StoreUnavailable as error:
                text = str(error)
            assert f"user {os.geteuid()} has 4 connections" in text

        assert client.lookup([key()]) == [None]


@pytest.mark.fault(123)
def test_a_connection_far_above_the_maximum_is_closed_at_once(path: Path) -> None:
    with serving(path, max_connections=2), ExitStack() as stack:
        for _ in range(1 + MAX_REFUSED):
            stack.enter_context(silent(path))
        assert stack.enter_context(silent(path)).recv(1) == b""


@pytest.mark.fault(123)
@pytest.mark.parametrize(
    "runner",
    [asyncio.Runner, partial(asyncio.Runner, loop_factory=uvloop.new_event_loop)],
    ids=["asyncio", "uvloop"],
)
def test_a_proxy_is_refused_with_the_reason(
    path: Path, runner: Callable[[], asyncio.Runner]
) -> None:
    async def call() -> None:
        client = AsyncArenaConnection(UnixEndpoint(str(path)), 10)
        try:
            with pytest.raises(StoreUnavailable, match="has 1 connections"):
                await client.call(GetStats())
        finally:
            await client.close()

    with serving(path, max_connections=2), silent(path), runner() as loop:
        for _ in range(20):
            loop.run(call())


@pytest.mark.fault(123)
def test_connections_without_a_first_request_end_and_make_room(path: Path) -> None:
    limits = serving(path, max_connections=4, hello_s=0.2)
    with limits, silent(path) as first, silent(path) as second:
        second.sendall(b"\x10\x00\x00\x00")  # the length of a request
        assert first.recv(1) == second.recv(1) == b""
        assert stats(path).memory.clients == 1


@pytest.mark.fault(123)
def test_all_users_together_have_a_maximum(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users, of = count(1000), Peer.of

    def other_user(connection: socket.socket) -> Peer:
        peer = of(connection)
        peer.uid = next(users)
        return peer

    monkeypatch.setattr(Peer, "of", other_user)
    with serving(path, max_connections=2), silent(path), silent(path):
        assert text_of(raw(path, HELLO)) == "the arena has 2 connections, which is the maximum"


@pytest.mark.fault(123)
def test_clients_that_are_gone_count_while_their_bytes_stay(path: Path) -> None:
    with serving(path, 8 * MIB, max_connections=8), opened(path) as store:
        store.put(key(), sized(100))
        digest = bytes.fromhex(key().digest)
        for n in range(3):
            client = ArenaConnection(str(path), "reader", 10)
            client.call(Read([digest]))
            client.close()
            while stats_of(store).memory.gone_bytes != PAGE_BYTES * (n + 1):
                time.sleep(0.01)
        assert "has 4 connections" in text_of(raw(path, HELLO))


@pytest.mark.fault(128)
def test_a_server_raises_its_limit_of_open_files_and_refuses_connections_above_it(
    path: Path,
) -> None:
    hard = OTHER_DESCRIPTORS + DESCRIPTORS_EACH * 80
    served = Serve(path, open_files=(64, hard))
    served.start()
    try:
        with ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(silent(path))
            assert "has 40 connections to the arena" in text_of(raw(path, HELLO))
    finally:
        served.kill()


async def close_after(path: Path, turns: int) -> None:
    """Start a server, and close it some turns of the loop after a client has connected."""
    server = ArenaServer(create_memory(MIB), ArenaIndex(ExtentAllocator(MIB, MIB)))
    await server.start(bind(path, 0o600))
    await asyncio.sleep(0)
    with silent(path) as connection:
        connection.sendall(HELLO)
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        await asyncio.to_thread(read_to_the_end, connection)


def read_to_the_end(connection: socket.socket) -> None:
    with suppress(ConnectionError):
        while connection.recv(2**16):
            pass


async def close_in_every_state(path: Path) -> None:
    await close_after(path, 0)  # the loop opens files of its own
    for turns in range(8):
        before = os.listdir("/proc/self/fd")  # noqa: PTH208
        await close_after(path, turns)
        deadline_s = time.monotonic() + 10
        while os.listdir("/proc/self/fd") != before:  # noqa: PTH208
            assert time.monotonic() < deadline_s, "a file stays open"
            gc.collect()
            await asyncio.sleep(0.01)


def test_a_server_closes_with_a_connection_in_every_state(path: Path) -> None:
    uvloop.run(close_in_every_state(path))


@pytest.mark.fault(121)
def test_calls_of_many_threads_at_a_server_that_hangs_end_with_the_deadline_of_each(
    path: Path,
) -> None:
    """One after the other they would take 30 s."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        began_s = time.monotonic()
        with opened(path, timeout_s=1) as store, ThreadPoolExecutor(30) as pool:
            calls = [pool.submit(store.get, key()) for _ in range(30)]
            for call in calls:
                with pytest.raises(StoreUnavailable):
                    call.result()

    assert time.monotonic() - began_s < 15


@pytest.mark.fault(121)
def test_a_server_that_answers_a_byte_at_a_time_takes_no_more_than_the_deadline(
    path: Path,
) -> None:
    """Each byte is within the time-out; all of them would take an hour."""
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not over.wait(0.2):
                try:
                    connection.send(b"\x7f")
                except OSError:
                    return

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(path))
        listener.listen()
        dripping = pool.submit(drip, listener)
        with opened(path, timeout_s=1) as store, pytest.raises(StoreUnavailable):
            store.get(key())
        over.set()
        dripping.result()


def test_a_message_and_its_keys_have_a_maximum(path: Path, client: ArenaConnection) -> None:
    digest = committed(client, "a", b"header")
    assert client.call(Find([digest] * MAX_KEYS))[0].headers == [b"header"] * MAX_KEYS
    longest = Unpin([0] * (MAX_REQUEST_BYTES - len(encode(Unpin([0] * 2**16))) + 2**16))
    assert len(encode(longest)) == MAX_REQUEST_BYTES
    stats_bytes = encode(GetStats())
    welcome, found, failed = raw(path, HELLO, encode(longest) + stats_bytes + b"\xff" * 4)
    assert isinstance(read_reply(welcome), Welcome)
    assert isinstance(read_reply(found), Stats)
    assert isinstance(read_reply(failed), Failed)
    assert "4096" in text_of(raw(path, HELLO, encode(Find([digest] * (MAX_KEYS + 1)))))
    above = encode(Unpin([*longest.numbers, 0]))
    assert f"of at most {MAX_REQUEST_BYTES}" in text_of(raw(path, HELLO, above))


def test_a_registered_name_has_a_maximum(path: Path, client: ArenaConnection) -> None:
    longest, above = b"n" * 4096, b"n" * 4097
    registered = client.call(Register(longest, longest))[0]
    assert registered.namespaces == {longest: longest}
    for request in (Register(above, b"n"), Register(b"m", above)):
        assert "4096" in text_of(raw(path, HELLO, encode(request)))


def test_headers_that_fit_into_no_reply_end_the_connection_alone(
    path: Path, client: ArenaConnection
) -> None:
    digest = committed(client, "a", bytes(MIB), 1)
    assert len(client.call(Find([digest] * 32))[0].headers) == 32
    for request in (
        Find([digest] * 33),
        Read([digest] * 33),
        ClaimKeys([digest] * 33, b"", 1, True),
    ):
        assert "do not fit" in text_of(raw(path, HELLO, encode(request)))
    assert len(client.call(Find([digest]))[0].headers) == 1


def test_a_listing_of_large_headers_has_small_pages(client: ArenaConnection) -> None:
    digests = {committed(client, str(n), bytes(MIB // 2), 1) for n in range(5)}
    seen, after, pages = set(), b"", 0
    while rows := client.call(List(after))[0].rows:
        assert len(rows) <= 2
        seen |= {row.digest for row in rows}
        after, pages = rows[-1].digest, pages + 1

    assert seen == digests
    assert pages == 3


def test_bytes_that_a_client_has_pinned_or_begun_have_a_maximum(
    path: Path, client: ArenaConnection
) -> None:
    digests = [committed(client, str(n)) for n in range(3)]
    pins, arena = client.call(Read(digests))
    assert [pin.number > 0 for pin in pins.pins] == [True, True, False]
    with closing(ArenaConnection(str(path), "reader", 10)) as other:
        assert other.call(Read(digests[2:]))[0].pins[0].number
    arena.released.append(pins.pins[0].number)
    assert client.call(Read(digests[2:]))[0].pins[0].number

    begun = [
        client.call(Begin(bytes.fromhex(key(f"b{n}").digest), b"", MIB, False))[0] for n in range(3)
    ]
    assert [each.refusal for each in begun] == ["", "", "full"]
    client.call(End(begun[0].number, b""))
    again = Begin(bytes.fromhex(key("c").digest), b"", MIB, False)
    assert client.call(again)[0].number
    above = Begin(bytes.fromhex(key("d").digest), b"", 2 * MIB + 1, False)
    assert client.call(above)[0].refusal == "too large"


def test_no_program_that_a_client_starts_inherits_the_memory(
    client: ArenaConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    inheritable: list[bool] = []

    def mapped(fd: int, *args: Any, **options: Any) -> Any:
        inheritable.append(os.get_inheritable(fd))
        return map_memory(fd, *args, **options)

    monkeypatch.setattr(connections, "map_memory", mapped)
    client.call(GetStats())

    assert inheritable == [False]


def test_a_server_follows_no_link_to_its_lock(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Path(f"{path}.lock").symlink_to(other)
    with pytest.raises(OSError, match="symbolic link"):
        bind(path, 0o600)

    assert not other.exists()


@pytest.mark.fault(127)
def test_a_folder_that_every_user_may_write_to_has_no_server_and_no_clients(path: Path) -> None:
    with serving(path), opened(path) as store:
        path.parent.chmod(0o1777)
        with pytest.raises(StoreUnavailable, match="every user may write"):
            store.lookup([key()])
        with pytest.raises(PermissionError, match="every user may write"):
            bind(path, 0o600)
        path.parent.chmod(0o700)
        assert store.lookup([key()]) == [None]


def test_a_write_ends_although_another_call_has_taken_all_the_time(path: Path) -> None:
    with serving(path, 8 * MIB), opened(path, timeout_s=0.2) as store:
        write = store.begin(key(), 100)
        assert write is not None
        mutex = store.connection._lock.mutex  # noqa: SLF001
        mutex.acquire()
        other = threading.Timer(0.4, mutex.release)
        other.start()

        assert write.commit(sized(100))
        other.join()
        until(path, begun_bytes=0, entries=1)


def test_a_begun_write_of_a_proxy_ends_with_its_connection(path: Path) -> None:
    with serving(path, 8 * MIB):
        proxy = ArenaConnection(str(path), "proxy", 10)
        begun, _ = proxy.call(Begin(bytes(32), b"", 0, replace=False))
        assert begun.number
        proxy.close()

        until(path, begun_bytes=0, gone_bytes=0, taken_bytes=0)


def test_a_folder_that_another_user_has_made_in_tmp_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    folder = tmp_path / "ec-store"
    folder.mkdir(mode=0o755)
    check_folder(folder)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 12345)

    with pytest.raises(PermissionError, match="another user has made"):
        check_folder(folder)
