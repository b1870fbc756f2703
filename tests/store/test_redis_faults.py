"""What goes wrong with a Redis, and what a store makes of it."""

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

from ec_store import Entry, EntryTooLarge, StoreUnavailable, redis_client
from ec_store.redis_entries import RedisEntries
from ec_store.redis_link import Node
from ec_store.redis_store import RedisStore
from ec_store.redis_url import redis_options
from tests.store.contract import assert_same, key, sized
from tests.store.redis_server import RedisServer, cluster, free_port

MIB = 2**20
Open = Callable[..., RedisStore]


@pytest.fixture
def store(server: RedisServer, client: Any) -> Iterator[RedisStore]:
    with RedisStore.from_url(server.url("chunk_bytes=64&timeout=2s")) as store:
        yield store


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def chunks(client: Any) -> list[bytes]:
    return sorted(client.scan_iter("epd:ec:{*}:*:*"))


def manifests(client: Any) -> list[bytes]:
    return list(client.scan_iter("epd:ec:{*}:m"))


def test_everything_in_redis_has_a_time_to_live(store: RedisStore, client: Any) -> None:
    store.put(key("small"), sized(10))
    store.put(key("large"), sized(1000))

    assert len(chunks(client)) == 16
    assert all(client.pttl(name) > 6 * 86_400_000 for name in client.scan_iter())


@pytest.mark.fault(29)
@pytest.mark.parametrize("which", ["first", "last", "manifest"])
def test_an_entry_of_which_a_part_was_evicted_is_a_miss_and_can_be_put_again(
    store: RedisStore, client: Any, which: str
) -> None:
    store.put(key(), sized(1000, 1))
    names = [*chunks(client), *manifests(client)]
    client.delete({"first": names[0], "last": names[-2], "manifest": names[-1]}[which])

    assert store.get(key()) is None
    assert (store.stats().misses, store.stats().corrupt) == (1, 0)
    assert store.lookup([key()]) == [None]
    assert which == "manifest" or not client.dbsize()
    assert store.put(key(), sized(1000, 2)) is True
    assert_same(sized(1000, 2), store.get(key()))


def test_an_entry_without_a_part_is_not_leased_and_is_put_again(
    store: RedisStore, client: Any
) -> None:
    store.put(key(), sized(1000, 1))
    client.delete(chunks(client)[3])

    assert store.lease([key(), key("none")], 5) == [None, None]
    assert store.put(key(), sized(1000, 2)) is True
    assert_same(sized(1000, 2), store.get(key()))


@pytest.mark.fault(20)
@pytest.mark.parametrize("length", [20, 100])
def test_every_flipped_byte_is_a_miss(store: RedisStore, client: Any, length: int) -> None:
    misses = corrupt = 0
    store.put(key(), sized(length))
    parts = {name: client.get(name) for name in client.scan_iter()}
    for name, value in parts.items():
        for place in range(len(value)):
            for kept, content in parts.items():
                client.set(kept, content)
            client.setrange(name, place, bytes([value[place] ^ 0x10]))

            assert store.get(key()) is None, (name, place)
            misses += 1
            corrupt += 1
            assert (store.stats().misses, store.stats().corrupt) == (misses, corrupt)
    assert misses > 300


@pytest.mark.fault(20)
def test_every_cut_of_a_part_is_a_miss(store: RedisStore, client: Any) -> None:
    store.put(key(), sized(100))
    parts = {name: client.get(name) for name in client.scan_iter()}
    for name, value in parts.items():
        for length in range(0, len(value), 7):
            for kept, content in parts.items():
                client.set(kept, content)
            client.set(name, value[:length])

            assert store.get(key()) is None, (name, length)


@pytest.mark.fault(28)
def test_the_entry_of_another_key_is_a_miss(store: RedisStore, client: Any) -> None:
    for length in (10, 1000):
        store.put(key("theirs"), sized(length))
        client.copy(
            f"epd:ec:{{{key('theirs').digest}}}:m", f"epd:ec:{{{key().digest}}}:m", replace=True
        )

        assert store.lookup([key()]) == [None]
        assert store.lease([key()], 5) == [None]
        assert [row.problem for row in store.verify()].count("it is another key's entry") == 1
        assert store.get(key()) is None
        assert store.get(key("theirs")) is not None
        store.delete([key("theirs")])
    assert store.stats().corrupt == 2


@pytest.mark.fault(29)
def test_an_entry_that_is_replaced_while_it_is_read_is_read_again(
    store: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key(), sized(1000, 1))
    whole = RedisEntries.read

    def replaced(self: RedisEntries, *arguments: Any) -> Entry:
        monkeypatch.setattr(RedisEntries, "read", whole)
        store.delete([key()])
        store.put(key(), sized(1000, 2))
        return whole(self, *arguments)

    monkeypatch.setattr(RedisEntries, "read", replaced)

    assert_same(sized(1000, 2), store.get(key()))


def test_a_chunk_evicted_before_its_manifest_is_written_is_a_drop(
    store: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RedisEntries._write_chunks  # noqa: SLF001 - after it, eviction hurts most

    def evicting(self: RedisEntries, *arguments: Any) -> None:
        whole(self, *arguments)
        client.delete(chunks(client)[0])

    monkeypatch.setattr(RedisEntries, "_write_chunks", evicting)
    with pytest.raises(StoreUnavailable, match="evicts"):
        store.put(key(), sized(1000))

    assert not client.dbsize()
    assert (store.stats().drops, store.stats().puts) == (1, 0)


def test_a_chunk_that_is_too_long_is_a_miss(store: RedisStore, client: Any) -> None:
    for extra in (1, 64, MIB):
        store.put(key(), sized(1000))
        client.append(chunks(client)[2], b"x" * extra)

        assert store.get(key()) is None
        assert not client.dbsize()
    assert store.stats().corrupt == 3


def test_a_foreign_value_under_an_entrys_name_is_a_miss_and_is_replaced(
    store: RedisStore, client: Any
) -> None:
    client.lpush(f"epd:ec:{{{key().digest}}}:m", "not ours")

    assert store.lookup([key()]) == [None]
    assert store.get(key()) is None
    client.lpush(f"epd:ec:{{{key().digest}}}:m", "not ours")
    assert store.put(key(), sized(100)) is True
    assert_same(sized(100), store.get(key()))


@pytest.mark.fault(22)
def test_writers_of_one_key_never_mix(server: RedisServer, client: Any) -> None:
    """They delete and write again all the time, so that manifests and chunks of many meet."""
    rounds, length = 60, 2000
    allowed = {bytes(sized(length, seed).data) for seed in range(6)}
    stop = threading.Event()

    def write(seed: int) -> None:
        with RedisStore.from_url(server.url("chunk_bytes=64")) as store:
            for _ in range(rounds):
                store.put(key(), sized(length, seed))
                store.delete([key()])

    def read() -> tuple[int, int, int]:
        wrong = hits = 0
        with RedisStore.from_url(server.url("chunk_bytes=64")) as store:
            while not stop.is_set():
                found = store.get(key())
                hits += found is not None
                wrong += found is not None and bytes(found.data) not in allowed
            return wrong, store.stats().corrupt, hits

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            list(pool.map(write, range(6)))
        finally:
            stop.set()
        results = [reader.result() for reader in readers]

    assert [(wrong, corrupt) for wrong, corrupt, _ in results] == [(0, 0)] * 2
    assert sum(hits for *_, hits in results) > 0


@pytest.mark.fault(23)
def test_a_writer_that_was_killed_leaves_what_expires_soon(
    store: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RedisEntries._write_chunks  # noqa: SLF001 - where a kill hurts most

    def killed(self: RedisEntries, *arguments: Any) -> None:
        whole(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(RedisEntries, "_write_chunks", killed)
    with pytest.raises(KeyboardInterrupt):
        store.put(key(), sized(1000))

    assert len(chunks(client)) == 16
    assert all(0 < client.pttl(name) <= 60_000 for name in chunks(client))
    assert store.get(key()) is None
    assert list(store.ls()) == []


def test_evict_removes_chunks_that_no_manifest_names(store: RedisStore, client: Any) -> None:
    store.put(key("lost"), sized(1000))
    client.delete(*manifests(client))
    store.put(key("kept"), sized(1000))
    staged = f"epd:ec:{{{key('new').digest}}}:{'0' * 32}:0"
    client.set(staged, "a chunk of a writer", px=50_000)

    assert store.evict() == 0
    assert len(chunks(client)) == 17
    assert client.exists(staged)
    assert_same(sized(1000), store.get(key("kept")))


def test_use_refreshes_the_time_to_live_and_a_lease_is_not_cut_short(
    store: RedisStore, client: Any
) -> None:
    store.put(key(), sized(1000))
    names = list(client.scan_iter())
    for use in (
        lambda: store.get(key()),
        lambda: store.put(key(), sized(1000)),
        lambda: store.lease([key()], 5),
    ):
        for name in names:
            client.pexpire(name, 100_000)
        store.lookup([key()])
        assert all(client.pttl(name) <= 100_000 for name in names)
        use()
        assert all(client.pttl(name) > 6 * 86_400_000 for name in names)

    store.lease([key()], 30 * 86_400)
    store.get(key())
    store.put(key(), sized(1000))
    store.lease([key()], 5)
    assert all(client.pttl(name) > 29 * 86_400_000 for name in names)


def test_a_lease_marks_every_part_as_used_and_a_lookup_of_the_chunks_does_not(
    store: RedisStore, client: Any
) -> None:
    """So that eviction by last use takes it late, the only thing that Redis has for a lease."""
    store.put(key(), sized(1000))
    names = [*chunks(client), *manifests(client)]

    def idle() -> list[int]:
        return [client.object("idletime", name) for name in names]

    while min(idle()) < 2:
        time.sleep(0.1)
    store.lookup([key()])
    assert min(idle()[:-1]) >= 2

    store.lease([key()], 5)
    assert max(idle()) < 2


@pytest.mark.fault(27)
def test_an_entry_expires(server: RedisServer, client: Any) -> None:
    with RedisStore.from_url(server.url("ttl=50ms")) as store:
        store.put(key(), sized(1000))
        time.sleep(0.1)

        assert store.get(key()) is None
        assert store.put(key(), sized(1000)) is True


def test_a_lookup_of_64_keys_is_one_round_trip(
    server: RedisServer, store: RedisStore, client: Any
) -> None:
    keys = [key(str(n)) for n in range(64)]
    for each in keys:
        store.put(each, sized(1000))

    def reads() -> int:
        return int(client.info("stats")["total_reads_processed"])

    between = -reads() + reads()
    before = reads()
    found = store.lookup(keys)

    assert all(found)
    assert reads() - before - between == 1


def test_a_small_entry_is_put_and_got_in_one_round_trip_each(
    server: RedisServer, client: Any
) -> None:
    with RedisStore.from_url(server.url()) as store:
        store.put(key("other"), sized(10))
        before = client.info("stats")["total_reads_processed"]
        store.put(key(), sized(1000))
        store.get(key())

        assert client.info("stats")["total_reads_processed"] - before == 3


def test_what_is_too_large_is_refused_and_not_read(server: RedisServer, store: RedisStore) -> None:
    store.put(key(), sized(5000))
    with RedisStore.from_url(server.url("max_entry_bytes=4KiB")) as small:
        with pytest.raises(EntryTooLarge):
            small.put(key("other"), sized(5000))
        assert small.get(key()) is None
    assert store.get(key()) is not None


@pytest.mark.fault(18)
def test_out_of_memory_stops_writing_for_a_while_and_reads_go_on(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = own_server.client
    with RedisStore.from_url(own_server.url("chunk_bytes=1MiB")) as store:
        store.put(key("kept"), sized(4 * MIB))
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 2 * MIB)
        with pytest.raises(StoreUnavailable, match="full"):
            store.put(key("new"), sized(8 * MIB))
        assert len(chunks(client)) == 4
        assert_same(sized(4 * MIB), store.get(key("kept")))
        calls = own_server.calls("set")
        with pytest.raises(StoreUnavailable, match="a moment ago"):
            store.put(key("new"), sized(10))
        assert own_server.calls("set") == calls
        assert store.stats().drops == 2

        client.config_set("maxmemory", 0)
        monkeypatch.setattr(store, "_writes_off_until", 0.0)
        assert store.put(key("new"), sized(8 * MIB)) is True


@pytest.mark.fault(29)
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-random"])
def test_under_eviction_every_entry_is_whole_or_a_miss(
    own_server: RedisServer, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = own_server.client
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 8 * MIB)
    hits = 0
    with RedisStore.from_url(own_server.url("chunk_bytes=64KiB")) as store:
        store.register_namespace("model", "space")
        for n in range(30):
            try:
                store.put(key(str(n)), sized(MIB, n))
            except StoreUnavailable as error:
                assert "full" in str(error)
                monkeypatch.setattr(store, "_writes_off_until", 0.0)
            for old in range(max(0, n - 8), n + 1):
                found = store.get(key(str(old)))
                hits += found is not None
                assert found is None or bytes(found.data) == bytes(sized(MIB, old).data)
        assert store.stats().corrupt == 0
        assert hits > 0
        assert client.info("stats")["evicted_keys"] > 0
        if policy == "volatile-lru":
            assert store.namespaces() == {"model": "space"}


@pytest.mark.fault(19)
def test_a_read_only_replica_serves_reads_and_takes_no_writes(own_server: RedisServer) -> None:
    client: Any = own_server.client
    with RedisStore.from_url(own_server.url("ttl=1h")) as store:
        store.put(key(), sized(1000))
        client.pexpire(manifests(client)[0], 100_000)
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
        for n in range(400):  # it looks up from loading every 2 MB
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
def test_a_server_that_is_away_is_unavailable_at_once(own_server: RedisServer) -> None:
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
            store.evict,
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
        with RedisStore.from_url(own_server.url("chunk_bytes=256KiB&timeout=1s")) as store:
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
def test_a_paused_server_costs_one_timeout_and_its_late_answers_reach_nobody(
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

    # A busy machine may hold up one turn: a second timeout would be in each of them.
    assert max(min(times) for times in took_s.values()) < 0.6


class Interrupted(BaseException):
    """What a signal handler raises, anywhere."""


@pytest.mark.fault(28)
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


def test_what_an_interrupted_call_left_to_be_collected_is_not_used(server: RedisServer) -> None:
    """Collected in a cycle, a connection is closed, and its call's end keeps it all the same."""
    options = redis_options(server.url())
    node = Node(options.addresses[0], options)
    call = node.link(time.monotonic() + 5)
    call.__enter__()
    cycle: list[object] = [call]
    cycle.append(cycle)
    del call, cycle
    gc.collect()

    with node.link(time.monotonic() + 5) as link:
        link.send([("PING",)])
        assert link.read() == b"PONG"
    node.close()


def test_a_forked_child_has_connections_of_its_own(store: RedisStore) -> None:
    keys = [key(str(n)) for n in range(10)]
    for n, each in enumerate(keys):
        store.put(each, sized(1000, n))

    def check() -> bool:
        return all(
            (found := store.get(each)) is not None and found.data == sized(1000, n).data
            for _ in range(20)
            for n, each in enumerate(keys)
        )

    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    assert check()
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert store.stats().corrupt == 0


@pytest.mark.fault(19)
def test_a_cluster_serves_on_while_slots_move_and_what_it_has_when_a_node_is_gone(
    tmp_path: Path,
) -> None:
    keys = [key(str(n)) for n in range(30)]
    with cluster(tmp_path) as servers:
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
            name = f"epd:ec:{{{keys[0].digest}}}:m"
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


def test_a_lookup_in_a_cluster_asks_every_node_once_and_none_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key(str(n)) for n in range(64)]
    with ExitStack() as stack:
        servers = stack.enter_context(cluster(tmp_path))
        url = f"redis+cluster://127.0.0.1:{servers[2].port}"
        store = stack.enter_context(RedisStore.from_url(url))
        for each in keys:
            store.put(each, sized(10))

        def commands() -> list[int]:
            return [s.calls("getrange") for s in servers]

        assert commands() == [0, 0, 0]
        assert all(store.lookup(keys))
        assert sum(commands()) == 64
        assert min(commands()) > 5

        with monkeypatch.context() as patched:

            def renewed_meanwhile(name: bytes) -> int:
                store._client._renew()  # noqa: SLF001 - as another thread does
                return key_slot(name)

            patched.setattr(redis_client, "key_slot", renewed_meanwhile)
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
    """A user who may do nothing gets what the protocol says from every call."""
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
                pytest.fail("a RedisError got out")
            except StoreUnavailable:
                continue
            pytest.fail("nothing was raised")
