"""Faults of a Redis server, and what the store does."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from ec_store import StoreUnavailable
from ec_store.redis import client
from ec_store.redis.connection import Node
from ec_store.redis.store import RedisStore
from ec_store.redis.url import redis_options
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.children import ended, start
from tests.support.redis_server import RedisServer, StartCluster, free_port

MIB = 2**20
Open = Callable[..., RedisStore]


@pytest.fixture
def store(server: RedisServer, client: Any) -> Iterator[RedisStore]:
    with RedisStore.from_url(server.url("timeout=2s")) as store:
        yield store


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.mark.fault(18)
def test_redis_without_memory_pauses_writes_and_serves_reads(
    own_server: RedisServer,
) -> None:
    client: Any = own_server.client
    with RedisStore.from_url(own_server.url()) as store:
        store.put(key("kept"), sized(4 * MIB))
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 2 * MIB)
        with pytest.raises(StoreUnavailable, match="full"):
            store.put(key("new"), sized(8 * MIB))
        assert client.dbsize() == 1
        assert_same(sized(4 * MIB), store.get(key("kept")))
        calls = own_server.calls("set")
        with pytest.raises(StoreUnavailable, match="a moment ago"):
            store.put(key("new"), sized(10))
        assert own_server.calls("set") == calls
        assert store.stats().drops == 2

        client.config_set("maxmemory", 0)
        store._writes_off_until = 0.0  # noqa: SLF001 - five seconds have passed
        assert store.put(key("new"), sized(8 * MIB)) is True


@pytest.mark.fault(19)
def test_a_read_only_replica_serves_reads_and_takes_no_writes(own_server: RedisServer) -> None:
    client: Any = own_server.client
    with RedisStore.from_url(own_server.url("ttl=1h")) as store:
        store.put(key(), sized(1000))
        client.pexpire(client.keys()[0], 100_000)
        client.replicaof("127.0.0.1", free_port())

        assert_same(sized(1000), store.get(key()))
        with pytest.raises(StoreUnavailable, match="cannot serve now"):
            store.put(key("new"), sized(10))
        assert own_server.calls("set") == 1
        client.replicaof("NO", "ONE")
        assert store.put(key("new"), sized(10)) is True


@pytest.mark.fault(19)
def test_while_it_loads_its_data_a_get_is_a_miss(tmp_path: Path) -> None:
    delay = {"key-load-delay": "5000"}
    with (
        RedisServer(tmp_path / "redis", {"save": "900 1", **delay}) as server,
        RedisStore.from_url(server.url()) as store,
    ):
        store.put(key(), sized(1000))
        client: Any = server.client
        for n in range(400):  # Redis handles connections once per 2 MB while loading
            client.set(f"other:{n}", os.urandom(200_000))
        client.save()
        server.restart()

        assert store.get(key()) is None
        with pytest.raises(StoreUnavailable, match="cannot serve now"):
            store.lookup([key()])
        with pytest.raises(StoreUnavailable, match="cannot serve now"):
            store.put(key("new"), sized(10))


@pytest.mark.fault(19)
def test_after_a_restart_the_first_call_is_answered(own_server: RedisServer) -> None:
    with RedisStore.from_url(own_server.url()) as store:
        store.put(key(), sized(10))
        own_server.restart()

        assert store.get(key()) is None
        own_server.restart()
        assert store.put(key(), sized(10)) is True


@pytest.mark.fault(16)
def test_an_unreachable_server_is_unavailable_at_once(own_server: RedisServer) -> None:
    with RedisStore.from_url(own_server.url()) as store:
        store.put(key(), sized(10))
        own_server.kill()
        began = time.monotonic()
        calls: list[Callable[[], object]] = [
            lambda: store.put(key(), sized(10)),
            lambda: store.get(key()),
            lambda: store.lookup([key()]),
            lambda: store.lease([key()], 1),
            lambda: store.delete([key()]),
            lambda: store.purge("model"),
            lambda: list(store.ls()),
            lambda: list(store.verify()),
            store.stats,
            lambda: store.register_namespace("a", "b"),
            store.namespaces,
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable):
                call()

        assert time.monotonic() - began < 5


def test_killed_while_entries_are_read_and_written(own_server: RedisServer) -> None:
    stop = threading.Event()

    def work(worker: int) -> tuple[int, int]:
        wrong = failures = 0
        with RedisStore.from_url(own_server.url("timeout=1s")) as store:
            while not stop.is_set():
                try:
                    store.put(key(str(worker)), sized(6 * MIB, worker))
                    found = store.get(key(str(worker)))
                    store.delete([key(str(worker))])
                except StoreUnavailable:
                    failures += 1
                    continue
                wrong += found is not None and found.data != sized(6 * MIB, worker).data
        return wrong, failures

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work, n) for n in range(3)]
        try:
            for _ in range(4):
                time.sleep(0.2)
                own_server.kill()
                time.sleep(0.05)
                own_server.start()
        finally:
            stop.set()
        results = [worker.result() for worker in workers]

    assert [wrong for wrong, _ in results] == [0] * 3
    assert sum(failures for _, failures in results) > 0


@pytest.mark.fault(16)
@pytest.mark.fault(28)
def test_a_paused_server_costs_one_timeout_and_late_replies_are_dropped(
    own_server: RedisServer,
) -> None:
    with RedisStore.from_url(own_server.url("timeout=300ms")) as store:
        for name in "ab":
            store.put(key(name), sized(1000, ord(name)))
        calls: Mapping[str, Callable[[], object]] = {
            "get": lambda: store.get(key("a")),
            "lookup": lambda: store.lookup([key("a")]),
            "put": lambda: store.put(key("c"), sized(5 * MIB)),
        }
        took_s: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(3):
            with own_server.paused():
                for name, call in calls.items():
                    began = time.monotonic()
                    with pytest.raises(StoreUnavailable):
                        call()
                    took_s[name].append(time.monotonic() - began)
            assert_same(sized(1000, ord("b")), store.get(key("b")))
            assert [info and info.key for info in store.lookup([key("b")])] == [key("b")]

    # A busy machine may delay one turn; a second timeout would delay all of them.
    assert max(min(times) for times in took_s.values()) < 0.6


class Interrupted(BaseException):
    """Exception from a signal handler, raised at any instruction."""


closed_by_the_collector = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
"""An exception between any two instructions may leave a socket to the garbage collector, which
closes it with a warning."""


@pytest.mark.fault(28)
@closed_by_the_collector
def test_an_interrupted_call_leaves_no_answer_for_the_next(
    server: RedisServer, store: RedisStore
) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    keys = [key(str(n)) for n in range(20)]
    for n, each in enumerate(keys):
        store.put(each, sized(3000, n))
    interrupts = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(400):
            n = turn % len(keys)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 * (turn % 50 + 1))
                store.get(keys[n])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupts += 1
            other = (n + 7) % len(keys)
            assert_same(sized(3000, other), store.get(keys[other]))
            assert [info and info.key for info in store.lookup(keys)] == keys
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert interrupts > 20
    assert store.stats().corrupt == 0


@closed_by_the_collector
def test_a_connection_of_an_interrupted_call_is_not_reused(server: RedisServer) -> None:
    """The collector closes a connection in a cycle, but the end of its call still puts it back."""
    options = redis_options(server.url())
    node = Node(options.addresses[0], options)
    call = node.connection(time.monotonic() + 5)
    call.__enter__()
    cycle: list[object] = [call]
    cycle.append(cycle)
    del call, cycle
    gc.collect()

    with node.connection(time.monotonic() + 5) as connection:
        connection.send([("PING",)])
        assert connection.read() == b"PONG"
    node.close()


def test_a_forked_child_opens_its_own_connections(store: RedisStore) -> None:
    keys = [key(str(n)) for n in range(10)]
    for n, each in enumerate(keys):
        store.put(each, sized(1000, n))

    def check() -> None:
        for _ in range(20):
            for n, each in enumerate(keys):
                assert_same(sized(1000, n), store.get(each))

    child = start(check)
    check()

    assert ended(child) == 0
    assert store.stats().corrupt == 0


def test_a_fork_while_a_thread_takes_memory_for_an_entry_does_not_hang_in_the_child(
    store: RedisStore,
) -> None:
    def get() -> None:
        signal.alarm(10)
        assert store.get(key()) is not None

    store.put(key(), sized(4 * MIB))
    with store._entries._buffers._lock.mutex:  # noqa: SLF001 - held as if by a thread of the parent
        child = start(get)

    assert ended(child) == 0


@pytest.mark.fault(19)
def test_a_cluster_serves_during_moves_of_slots_and_the_rest_without_a_node(
    start_cluster: StartCluster,
) -> None:
    keys = [key(str(n)) for n in range(30)]
    with start_cluster() as servers:
        url = servers[0].url("timeout=500ms", "redis+cluster").replace("/?", "?")
        with RedisStore.from_url(url) as store:
            for n, each in enumerate(keys):
                store.put(each, sized(1000, n))
            slot = int(servers[0].command("CLUSTER", "KEYSLOT", f"{{{keys[0].digest}}}"))
            owner = next(s for s in servers if s.command("CLUSTER", "COUNTKEYSINSLOT", slot))
            other = next(s for s in servers if s is not owner)
            ids = {s.port: s.command("CLUSTER", "MYID").decode() for s in servers}
            other.command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner.port])
            owner.command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[other.port])
            name = f"epd:ec:{{{keys[0].digest}}}:e2"
            owner.command("MIGRATE", "127.0.0.1", other.port, name, 0, 1000)

            assert_same(sized(1000, 0), store.get(keys[0]))
            for server in (other, owner):
                server.command("CLUSTER", "SETSLOT", slot, "NODE", ids[other.port])
            assert_same(sized(1000, 0), store.get(keys[0]))
            assert [info and info.key for info in store.lookup(keys)] == keys

            other.kill()
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                store.lookup(keys)
            assert time.monotonic() - began < 10


def test_cluster_lookup_queries_each_node_once_and_skips_hanging_nodes(
    start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key(str(n)) for n in range(64)]
    with ExitStack() as stack:
        servers = stack.enter_context(start_cluster())
        url = f"redis+cluster://127.0.0.1:{servers[2].port}"
        store = stack.enter_context(RedisStore.from_url(url))
        for each in keys:
            store.put(each, sized(10))

        def commands() -> list[int]:
            return [s.calls("getrange") for s in servers]

        before = commands()
        assert all(store.lookup(keys))
        asked = [now - then for now, then in zip(commands(), before, strict=True)]
        assert sum(asked) == 64
        assert min(asked) > 5

        with monkeypatch.context() as patched:

            def forgotten_meanwhile(name: bytes) -> int:
                store._client._slots = []  # noqa: SLF001 - as another thread does
                return key_slot(name)

            patched.setattr(client, "key_slot", forgotten_meanwhile)
            assert all(store.lookup(keys))

        first, hanging = servers[0], servers[2]
        of_first = next(k for k in keys if key_slot(f"{{{k.digest}}}".encode()) < 5000)
        nodes = f"127.0.0.1:{hanging.port},127.0.0.1:{first.port}"
        url = f"redis+cluster://{nodes}?timeout=3s&connect_timeout=300ms"
        with hanging.paused(), RedisStore.from_url(url) as other:
            assert other.get(of_first) is not None


def test_interrupted_connections_are_not_leaked(server: RedisServer, store: RedisStore) -> None:
    client: Any = server.client
    before = len(client.client_list())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.get(key(str(n))), range(200)))
    store.close()

    assert len(client.client_list()) <= before


def test_a_redis_error_is_never_seen(own_server: RedisServer) -> None:
    """The user may run no command; every call gets an error of the protocol."""
    client: Any = own_server.client
    client.acl_setuser("nobody", enabled=True, passwords=["+pw"], keys=["*"], reset=True)
    url = f"redis://nobody:pw@127.0.0.1:{own_server.port}"
    with RedisStore.from_url(url) as store:
        for call in (
            lambda: store.get(key()),
            lambda: store.put(key(), sized(10)),
            store.stats,
            lambda: store.lookup([key()]),
        ):
            try:
                call()
            except redis.RedisError:
                pytest.fail("a RedisError was raised")
            except StoreUnavailable:
                continue
            pytest.fail("nothing was raised")
