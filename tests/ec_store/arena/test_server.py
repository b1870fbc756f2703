"""What a client, or its server, may do to the others: end, hang, lie, come back."""

import errno
import fcntl
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest.mock import Mock

import pytest

from ec_store.arena import connection as connections
from ec_store.arena import peers
from ec_store.arena.connection import ArenaConnection
from ec_store.arena.protocol import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    VERSION,
    Begin,
    Begun,
    ClaimKeys,
    Done,
    End,
    Failed,
    Find,
    Frames,
    GetStats,
    Hello,
    Read,
    Register,
    encode,
    read_reply,
)
from ec_store.arena.server import ArenaServer
from ec_store.arena.sockets import bind
from ec_store.arena.store import ArenaStore
from ec_store.errors import EntryTooLarge, StoreUnavailable
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.arena.served import (
    MIB,
    Serve,
    end,
    in_child,
    lose_connection,
    opened,
    raw,
    refused,
    serving,
    stats,
    until,
    wait_for,
)

R = TypeVar("R")
KEY = bytes.fromhex(key().digest)


@pytest.mark.fault(124)
def test_a_killed_writer_leaves_nothing(path: Path, server: ArenaServer, store: ArenaStore) -> None:
    child = in_child(
        path,
        f"store.connection.call(Begin({KEY!r}, b'', 2**20, False))\n"
        "print('ready', flush=True); time.sleep(60)",
    )
    assert stats(path).memory.begun_bytes == MIB
    end(child)

    assert store.put(key(), sized(100)) is True
    until(path, begun_bytes=0, gone_bytes=0)
    assert store.delete([key()]) == 1
    assert stats(path).taken_bytes == 0


@pytest.mark.fault(125)
def test_entries_of_a_killed_reader_can_be_evicted(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    store.put(key(), sized(MIB))
    child = in_child(path, "found = store.get(key()); print('ready', flush=True); time.sleep(60)")
    assert stats(path).memory.pinned_bytes == MIB
    end(child)
    until(path, pinned_bytes=0, gone_bytes=0)

    assert store.put(key("large"), sized(8 * MIB)) is True
    assert store.lookup([key()]) == [None]


@pytest.mark.fault(81)
def test_bytes_that_a_living_process_may_copy_stay_after_its_connection(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    store.put(key(), sized(MIB, 1))
    reader = opened(path)
    found = reader.get(key())
    lose_connection(reader)
    until(path, gone_bytes=MIB)
    store.delete([key()])
    for n in range(20):
        store.put(key(str(n)), sized(MIB, 2))

    assert_same(sized(MIB, 1), found)
    assert stats(path).memory.pinned_bytes == MIB
    assert reader.lookup([key("19")]) != [None]
    del found
    reader.lookup([])
    reader.lookup([key("19")])  # reports that nothing of the earlier connection is read any more
    assert stats(path).memory.gone_bytes == 0
    reader.close()


@pytest.fixture
def no_peer_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel know no `SO_PEERPIDFD`, as before Linux 6.5."""
    monkeypatch.setattr(peers, "_SO_PEERPIDFD", 2**16 - 1)


@pytest.mark.fault(81)
@pytest.mark.usefixtures("no_peer_descriptors")
def test_bytes_stay_for_a_time_without_a_descriptor_of_the_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before Linux 6.5 in another PID namespace, where the kernel says 0 for the process."""
    refused = OSError(errno.EINVAL, "0 is no process")
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=refused))
    with serving(path, 8 * MIB, gone_s=0.5), opened(path) as store:
        store.put(key(), sized(MIB))
        reader = opened(path)
        found = reader.get(key())
        lose_connection(reader)
        until(path, gone_bytes=MIB)
        until(path, gone_bytes=0)
        assert found is not None
        reader.close()


@pytest.mark.fault(81)
@pytest.mark.usefixtures("no_peer_descriptors")
def test_bytes_stay_on_a_kernel_without_descriptors_of_peers(path: Path) -> None:
    with serving(path, 8 * MIB, gone_s=0.1), opened(path) as store:
        store.put(key(), sized(MIB, 1))
        child = in_child(
            path,
            "found = store.get(key()); lose_connection(store)\n"
            "print('ready', flush=True); time.sleep(60)",
        )
        until(path, gone_bytes=MIB)
        time.sleep(0.5)
        assert stats(path).memory.gone_bytes == MIB
        end(child)
        until(path, gone_bytes=0)


def test_a_pin_ends_if_its_entry_cannot_be_copied(
    path: Path, server: ArenaServer, store: ArenaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key(), sized(MIB + 2))  # in two segments
    refuse = Mock(side_effect=MemoryError)
    monkeypatch.setattr(store._buffers, "take_buffer", refuse)  # noqa: SLF001
    with pytest.raises(MemoryError):
        store.get(key())
    assert store.lookup([key()]) != [None]
    assert stats(path).memory.pinned_bytes == 0


def test_a_server_replaces_no_file_but_a_socket(path: Path) -> None:
    path.write_text("not a socket")
    with pytest.raises(OSError, match="in use"):
        bind(path, 0o600)

    assert path.read_text() == "not a socket"


def test_a_server_that_allocates_its_memory_refuses_clients_at_once(path: Path) -> None:
    with bind(path, 0o600), opened(path) as store, pytest.raises(StoreUnavailable, match="refused"):
        store.get(key())


@pytest.mark.fault(126)
@pytest.mark.parametrize(
    "message",
    [
        b"\xff" * 100,
        (MAX_REQUEST_BYTES + 1).to_bytes(4, "little"),
        b"\x00\x00\x00\x00",
        encode(End(7, b"header")),
        encode(Hello(VERSION, "proxy")),
        encode(Read([b"short"])),
        encode(ClaimKeys([KEY], b"owner", -1.0)),
        encode(ClaimKeys([KEY], b"owner", float("nan"))),
        encode(Done(1)),
        encode(Register(b"x" * 65537, b"")),
        encode(Register(b"model", b"\xff")),
        encode(Register(b"\xff", b"namespace")),
        encode(ClaimKeys([KEY], b"x" * 257, 1.0)),
    ],
)
def test_a_client_that_sends_what_none_sends_is_disconnected_alone(
    path: Path, server: ArenaServer, store: ArenaStore, message: bytes
) -> None:
    store.put(key(), sized(100))
    *_, last = raw(path, encode(Hello(VERSION, "writer")), message)

    assert isinstance(read_reply(last), Failed)
    assert_same(sized(100), store.get(key()))
    until(path, clients=2)  # the store's, and the one that asks


@pytest.mark.parametrize("hello", [b"\xff" * 100, encode(GetStats())])
def test_a_connection_with_another_first_request_is_closed(
    path: Path, server: ArenaServer, hello: bytes
) -> None:
    [reply] = raw(path, hello)

    assert isinstance(read_reply(reply), Failed)
    assert stats(path).memory.clients == 1


def test_a_client_of_another_version_is_told_both_versions(path: Path, server: ArenaServer) -> None:
    [reply] = raw(path, encode(Hello(VERSION + 1, "writer")))

    assert f"version {VERSION}" in read_reply(reply).text  # type: ignore[union-attr]
    assert f"version {VERSION + 1}" in read_reply(reply).text  # type: ignore[union-attr]


def test_a_proxy_gets_no_memory(path: Path, server: ArenaServer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(encode(Hello(VERSION, "proxy")))
        _, fds, _, _ = socket.recv_fds(connection, 4096, 4)

        assert fds == []


@pytest.mark.parametrize("request_", [Read([KEY]), Begin(KEY, b"", 100, replace=False)])
def test_a_proxy_reads_and_writes_no_payload(
    path: Path, server: ArenaServer, request_: Read | Begin
) -> None:
    proxy = ArenaConnection(str(path), "proxy", 10)
    with pytest.raises(StoreUnavailable, match="a proxy sends no"):
        proxy.call(request_)  # type: ignore[misc]


def test_a_reader_cannot_write(path: Path, server: ArenaServer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(encode(Hello(VERSION, "reader")))
        _, [fd], _, _ = socket.recv_fds(connection, 4096, 4)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
    finally:
        os.close(fd)


def test_no_client_can_resize_the_memory(path: Path, server: ArenaServer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(encode(Hello(VERSION, "writer")))
        _, [fd], _, _ = socket.recv_fds(connection, 4096, 4)
    try:
        for size in (0, 16 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(fd)


@pytest.mark.fault(122)
def test_a_full_memory_evicts_and_refuses_only_when_all_is_in_use(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    for n in range(20):
        assert store.put(key(str(n)), sized(MIB, n)) is True
    held = [store.get(key(str(n))) for n in range(12, 20)]

    with pytest.raises(StoreUnavailable, match="full"):
        store.put(key("more"), sized(2))
    with pytest.raises(EntryTooLarge):
        store.put(key("more"), sized(8 * MIB + 2))
    for n, each in enumerate(held):
        assert_same(sized(MIB, 12 + n), each)
    del held, each
    assert store.put(key("more"), sized(2)) is True
    assert store.stats().drops == 2


def test_a_put_waits_for_another_writer_of_the_entry(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    other = ArenaConnection(str(path), "writer", 10)
    begun, arena = other.call(Begin(KEY, b"", 100, False))
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(store.put, key(), sized(100))
        time.sleep(0.1)
        assert not put.done()
        other.call(End(begun.number, b""), within=arena)
        assert put.result(10) is True
    other.close()


@pytest.mark.fault(82)
def test_a_forked_child_connects_itself(path: Path, server: ArenaServer, store: ArenaStore) -> None:
    store.put(key(), sized(MIB, 1))
    found = store.get(key())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            assert_same(sized(MIB, 1), store.get(key()))
            os.write(write, b"same")
            time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(read, 10) == b"same"
    assert stats(path).memory.clients == 3  # the parent's, the child's, and the one that asks
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until(path, clients=2, gone_bytes=0, pinned_bytes=MIB)
    assert_same(sized(MIB, 1), found)
    os.close(read)
    os.close(write)


def test_a_client_that_reads_no_reply_gets_no_more_of_them(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(encode(Hello(VERSION, "proxy")))
        connection.recv(4096)
        connection.setblocking(False)
        request, sent = encode(ClaimKeys([], b"o", 1.0)) * 1000, 0
        while select.select([], [connection], [], 0.5)[1]:
            sent += connection.send(request)
            assert sent < 64 * MIB, "the server goes on reading"
        assert store.put(key(), sized(100)) is True


def test_a_client_that_reads_no_large_reply_gets_the_next_ones_when_it_does(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(encode(Hello(VERSION, "writer")))
        connection.recv(4096)
        connection.sendall(encode(Begin(KEY, b"", 1, False)))
        begun = read_reply(connection.recv(4096)[4:])
        assert isinstance(begun, Begun)
        connection.sendall(encode(End(begun.number, bytes(2**20))))
        connection.recv(4096)
        connection.sendall(encode(Find([KEY])) * 100)
        [(session, _)] = server._sessions.values()  # noqa: SLF001
        wait_for(session.transport.get_write_buffer_size)
        assert store.put(key("other"), sized(100)) is True  # so all 100 have been received
        assert session.transport.get_write_buffer_size() < 4 * MIB
        replies = Frames(MAX_REPLY_BYTES)
        received = 0
        while received < 100:
            received += len(list(replies.split(connection.recv(2**20))))


def once_answered(call: Callable[[], R]) -> R:
    """Return the result of a call that the server answers again after a while."""
    deadline_s = time.monotonic() + 10
    while True:
        try:
            return call()
        except StoreUnavailable:
            assert time.monotonic() < deadline_s


class TestProcess:
    """`ec-store serve` as a process."""

    @pytest.mark.fault(120)
    def test_a_restarted_server_is_found_and_old_entries_stay_readable(
        self, path: Path, served: Serve
    ) -> None:
        with opened(path) as store:
            store.put(key(), sized(MIB, 1))
            found = store.get(key())
            served.kill()
            with pytest.raises(StoreUnavailable):
                store.get(key())
            served.start()

            assert store.get(key()) is None
            assert store.put(key(), sized(MIB, 2)) is True
            assert_same(sized(MIB, 2), store.get(key()))
            assert_same(sized(MIB, 1), found)

    @pytest.mark.fault(120)
    def test_the_first_call_after_a_restart_is_answered(self, path: Path, served: Serve) -> None:
        with opened(path) as store:
            store.put(key(), sized(100))
            served.kill()
            served.start()

            assert store.lookup([key()]) == [None]

    @pytest.mark.fault(120)
    def test_a_write_across_a_restart_fails_and_spoils_nothing(
        self, path: Path, served: Serve
    ) -> None:
        connection = ArenaConnection(str(path), "writer", 10)
        begun, arena = connection.call(Begin(KEY, b"", 100, False))
        served.kill()
        served.start()
        with pytest.raises(StoreUnavailable):
            connection.call(End(begun.number, b"header"), within=arena)
        with pytest.raises(StoreUnavailable, match="was lost"):
            connection.call(End(begun.number, b"header"), within=arena)

        assert connection.call(Read([KEY]))[0].pins[0].number == 0
        connection.close()

    @pytest.mark.fault(121)
    def test_a_stopped_server_is_unavailable_and_comes_back(
        self, path: Path, served: Serve
    ) -> None:
        with opened(path, timeout_s=0.3) as store:
            store.put(key(), sized(100))
            served.signal(signal.SIGSTOP)
            with pytest.raises(StoreUnavailable):
                store.get(key())
            served.signal(signal.SIGCONT)
            assert_same(sized(100), once_answered(partial(store.get, key())))

    @pytest.mark.fault(121)
    def test_every_call_at_a_stopped_server_fails(self, path: Path, served: Serve) -> None:
        with opened(path) as store:
            store.put(key(), sized(100))
        calls: list[Callable[[ArenaStore], object]] = [
            lambda store: store.put(key(), sized(100)),
            lambda store: store.get(key()),
            lambda store: store.lookup([key()]),
            lambda store: store.lease([key()], 1),
            lambda store: store.claim([key()], "owner", 1),
            lambda store: store.claim_or_find([key()], "owner", 1),
            lambda store: store.release([key()], "owner"),
            lambda store: store.delete([key()]),
            lambda store: store.purge("model"),
            lambda store: list(store.ls()),
            lambda store: list(store.verify()),
            lambda store: store.stats(),
            lambda store: store.namespaces(),
            lambda store: store.register_namespace("model", "namespace"),
        ]
        for connected in (False, True):
            with ExitStack() as stack:
                stores = [stack.enter_context(opened(path, timeout_s=0.1)) for _ in calls]
                if connected:
                    for store in stores:
                        once_answered(store.check)
                served.signal(signal.SIGSTOP)
                for call, store in zip(calls, stores, strict=True):
                    with pytest.raises(StoreUnavailable):
                        call(store)
                served.signal(signal.SIGCONT)
                for store in stores:
                    once_answered(store.check)  # reports that its earlier copies have ended
                until(path, begun_bytes=0, pinned_bytes=0, gone_bytes=0)
        until(path, clients=1, begun_bytes=0, pinned_bytes=0, gone_bytes=0)

    def test_the_server_frees_what_an_unanswered_request_pinned_or_began(
        self, path: Path, served: Serve
    ) -> None:
        with opened(path, timeout_s=0.3) as store:
            store.put(key(), sized(MIB))
            served.signal(signal.SIGSTOP)
            with pytest.raises(StoreUnavailable):
                store.get(key())
            served.signal(signal.SIGCONT)
            until(path, clients=1, gone_bytes=MIB)  # one: that of `stats`
            assert store.lookup([key()]) != [None]
            assert stats(path).memory.gone_bytes == 0

            served.signal(signal.SIGSTOP)
            with pytest.raises(StoreUnavailable):
                store.put(key("other"), sized(MIB))
            served.signal(signal.SIGCONT)
            until(path, clients=1, gone_bytes=MIB)
            assert store.put(key("other"), sized(MIB)) is True
            assert stats(path).memory.gone_bytes == 0

    @pytest.mark.fault(129)
    def test_two_servers_never_share_a_path(self, path: Path, served: Serve) -> None:
        with opened(path) as store:
            store.put(key(), sized(100))
            ended = refused(f"shm://{path}")

            assert ended.returncode == 1
            assert "another server listens there" in ended.stderr
            assert_same(sized(100), store.get(key()))

    @pytest.mark.fault(79)
    def test_too_little_memory_is_an_error_before_any_is_taken(self, path: Path) -> None:
        url = f"shm://{path}?max_bytes=100000GiB"
        ended = refused(url)

        assert ended.returncode == 1
        assert "are left on the machine" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_an_idle_client_releases_an_entry_when_it_is_no_longer_read(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    store.put(key(), sized(MIB))
    found = store.get(key())
    assert stats(path).memory.pinned_bytes == MIB
    del found

    until(path, pinned_bytes=0)


def test_an_entry_may_be_released_within_another_call(
    path: Path, server: ArenaServer, store: ArenaStore
) -> None:
    store.put(key(), sized(MIB))
    found = store.get(key())
    with store.connection._lock.mutex:  # noqa: SLF001
        del found  # as a garbage collection does, which must not wait
    assert stats(path).memory.pinned_bytes == MIB
    store.lookup([key()])

    until(path, pinned_bytes=0)


def test_a_release_does_not_wait_for_a_server_that_reads_nothing(
    path: Path, server: ArenaServer, store: ArenaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key(), sized(MIB))
    found = store.get(key())
    with monkeypatch.context() as full:
        full.setattr(connections, "_has_event", lambda *_: False)
        del found
    assert stats(path).memory.pinned_bytes == MIB
    store.lookup([key()])

    assert stats(path).memory.pinned_bytes == 0
