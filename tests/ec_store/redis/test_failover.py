"""Store on a Redis with a failover of the master, and on one that answers very slowly."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ec_store import EntryKey, StoreUnavailable
from ec_store.redis.connection import Node
from ec_store.redis.store import RedisStore
from ec_store.redis.url import redis_options
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.waiting import until
from tests.support.redis_server import Certificates, RedisServer, StartCluster, has_tls
from tests.support.relay import Relay

THREADS = 4
KEYS = 40
LENGTH = 3000
TURNS = 10
MIB = 2**20


@contextmanager
def used(store: RedisStore) -> Iterator[None]:
    """Use the store from threads, which may see only hits, misses and `StoreUnavailable`."""
    stop = threading.Event()

    def turn(n: int) -> None:
        store.put(key(str(n)), sized(LENGTH, n))
        found = store.get(key(str(n)))
        assert found is None or found.data == sized(LENGTH, n).data
        store.lookup([key(str(other)) for other in range(KEYS)])
        store.lease([key(str(n))], 5)

    turns = [0] * THREADS

    def work(worker: int) -> None:
        while not stop.is_set():
            try:
                turn((worker + turns[worker] * THREADS) % KEYS)
            except StoreUnavailable:
                time.sleep(0.002)
            turns[worker] += 1

    with ThreadPoolExecutor(THREADS) as pool:
        workers = [pool.submit(work, n) for n in range(THREADS)]

        def go_on() -> None:
            """Wait until each thread has made some more turns, or one has failed."""
            due = [done + TURNS for done in turns]
            until(
                lambda: (
                    any(worker.done() for worker in workers)
                    or all(done >= least for done, least in zip(turns, due, strict=True))
                )
            )

        try:
            go_on()
            yield
            go_on()
        finally:
            stop.set()
        for worker in workers:
            worker.result()


def answers(store: RedisStore) -> bool:
    """Return whether the store answers in time; on a busy machine it may not."""
    with suppress(StoreUnavailable):
        store.stats()
        return True
    return False


def is_master(server: RedisServer) -> bool:
    return bool(server.command("ROLE")[0] == b"master")


def has(server: RedisServer, identifier: str) -> bool:
    return bool(server.command("EXISTS", f"epd:ec:{{{key(identifier).digest}}}:e2"))


@pytest.fixture
def master(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "master") as server:
        yield server


@pytest.fixture
def replica(tmp_path: Path, master: RedisServer) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "replica", {"replicaof": f"127.0.0.1 {master.port}"}) as server:
        until(lambda: server.command("ROLE")[3] == b"connected")
        yield server


@pytest.mark.fault(19)
@pytest.mark.parametrize("how", ["demoted", "killed"])
def test_a_promoted_replica_serves_the_entries(
    master: RedisServer, replica: RedisServer, how: str
) -> None:
    with (
        Relay(master).in_thread() as address,
        RedisStore.from_url(address.url("timeout=2s")) as store,
    ):
        store.put(key("before"), sized(2 * MIB, 1))
        with used(store):
            until(lambda: has(replica, "before"))
            replica.command("REPLICAOF", "NO", "ONE")
            address.target = replica
            if how == "killed":
                master.kill()
            else:
                master.command("REPLICAOF", "127.0.0.1", replica.port)

        assert_same(sized(2 * MIB, 1), store.get(key("before")))
        assert store.put(key("after"), sized(LENGTH)) is True
        assert has(replica, "after")
        assert store.lease([key("before"), key("after")], 5) == store.lookup(
            [key("before"), key("after")]
        )


@pytest.mark.fault(19)
def test_a_demoted_master_is_left_by_the_call_that_finds_out(
    master: RedisServer, replica: RedisServer
) -> None:
    """All connections lead to the old master; none of them may be used again."""
    with (
        Relay(master).in_thread() as address,
        RedisStore.from_url(address.url("timeout=2s")) as store,
    ):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: store.put(key(str(n)), sized(MIB)), range(32)))
        replica.command("REPLICAOF", "NO", "ONE")
        address.target = replica
        master.command("REPLICAOF", "127.0.0.1", replica.port)

        assert store.put(key("after"), sized(LENGTH)) is True


def test_a_connection_that_was_in_use_when_its_server_was_left_is_not_used_again(
    master: RedisServer,
) -> None:
    options = redis_options(master.url())
    node, until_s = Node(options.addresses[0], options), time.monotonic() + 10
    with node.connection(until_s) as kept:
        pass
    with node.connection(until_s) as connection:
        assert connection is kept
        node.close_connections()
    with node.connection(until_s) as connection:
        assert connection is not kept
    node.close_connections()


def test_calls_after_a_close_leave_no_connection_to_any_node(start_cluster: StartCluster) -> None:
    keys = [key(str(n)) for n in range(KEYS)]
    with start_cluster() as servers:
        clients: list[Any] = [server.client for server in servers]
        before = [len(client.client_list()) for client in clients]
        url = f"redis+cluster://127.0.0.1:{servers[0].port}"
        with RedisStore.from_url(url) as store:
            store.close()
            assert store.lookup(keys) == [None] * KEYS

            until(lambda: [len(client.client_list()) for client in clients] == before)


@pytest.mark.fault(19)
def test_a_cluster_serves_through_a_change_of_masters(start_cluster: StartCluster) -> None:
    """First the replica takes over; then the old master, a replica now, takes over after a kill."""
    keys = [key(str(n)) for n in range(KEYS)]
    with start_cluster(replica=True, node_timeout_ms=700) as servers:
        first, replica = servers[0], servers[3]
        url = first.url("timeout=2s", "redis+cluster").replace("/?", "?")
        with RedisStore.from_url(url) as store:
            with used(store):
                replica.command("CLUSTER", "FAILOVER")
                until(lambda: is_master(replica) and is_up(servers))
            check(store, keys)
            assert replica.command("DBSIZE") > 5

            until(lambda: not is_master(first) and first.command("ROLE")[3] == b"connected")
            with used(store):
                replica.kill()
                until(lambda: is_master(first) and is_up(servers))
            check(store, keys)


def is_up(servers: Sequence[RedisServer]) -> bool:
    states = [each.command("CLUSTER INFO")["cluster_state"] for each in servers if each.process]
    return set(states) == {"ok"}


def check(store: RedisStore, keys: Sequence[EntryKey]) -> None:
    """Check that every key on every node can be looked up, deleted and written at once."""
    assert len(store.lookup(keys)) == KEYS
    for each in keys:
        store.delete([each])
        assert store.put(each, sized(LENGTH, int(each.identifier))) is True
    assert len(list(store.ls())) == KEYS


SLOW: dict[str, Callable[[RedisStore], Any]] = {
    "get of a small entry": lambda store: store.get(key("small")),
    "get of a large entry": lambda store: store.get(key("large")),
    "lookup": lambda store: store.lookup([key("small")] * 64),
    "lease": lambda store: store.lease([key("small")], 5),
    "put": lambda store: store.put(key("new"), sized(8 * MIB)),
    "delete": lambda store: store.delete([key("small")]),
    "stats": lambda store: store.stats(),
    "namespaces": lambda store: store.namespaces(),
}


@pytest.mark.fault(16)
@pytest.mark.parametrize("tls", [False, True])
def test_an_answer_byte_by_byte_has_the_timeout_of_no_answer(tmp_path: Path, tls: bool) -> None:
    if tls and not has_tls():
        pytest.skip("this redis-server was built without TLS")
    certificates = Certificates.make(tmp_path) if tls else None
    ca = f"ssl_ca_certs={certificates.ca}" if certificates else ""
    with (
        RedisServer(tmp_path / "redis", tls=certificates) as server,
        Relay(server).in_thread() as address,
    ):
        scheme = "rediss" if tls else "redis"
        with RedisStore.from_url(server.url(ca, scheme)) as store:
            store.put(key("small"), sized(LENGTH))
            store.put(key("large"), sized(MIB))
        for name, call in SLOW.items():
            address.answers.bytes_per_s = None
            url = address.url(f"timeout=500ms&{ca}", scheme)
            with RedisStore.from_url(url) as store:
                if name != "stats":  # the connection of `stats` must be the slow one
                    until(partial(answers, store))
                address.answers.bytes_per_s = 3
                # A timeout per read would never expire, since each read returns some bytes.
                with pytest.raises(StoreUnavailable):
                    call(store)


def test_a_call_of_many_steps_takes_one_timeout_at_most(
    master: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer comes in time, but all of them together do not."""
    with (
        Relay(master).in_thread() as address,
        RedisStore.from_url(address.url("timeout=600ms")) as store,
    ):
        store.put(key(), sized(10 * MIB))
        master.command("PEXPIRE", f"epd:ec:{{{key().digest}}}:e2", 60_000)
        address.answers.latency_s = 0.4
        with pytest.raises(StoreUnavailable):
            store.lease([key()], 5)
