"""A memory with a directory behind it, a Redis, or both; and several such hosts."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ec_store import Entry, EntryKey, concurrency
from ec_store.arena.protocol import GetStats, TierStats
from ec_store.arena.server import ArenaServer
from ec_store.arena.store import ArenaStore
from ec_store.arena.tier import Tier, TierLimits
from ec_store.arena.url import ArenaOptions
from ec_store.disk.config import DiskConfig
from ec_store.disk.store import SharedDiskStore
from ec_store.entry import EntryInfo
from ec_store.errors import StoreUnavailable
from ec_store.redis.store import RedisStore
from ec_store.redis.url import RedisOptions, redis_options
from ec_store.testing.stores import assert_same, entry, key, sized
from tests.ec_store.arena.served import MIB, serving, wait_for
from tests.ec_store.disk.on_disk import counted, path_of
from tests.ec_store.waiting import until
from tests.support.redis_server import RedisServer

WAIT_S = 20.0
"""Longest wait for what happens in the background, and the time of look-ups on a busy machine."""

PATIENCE = "timeout=20s&connect_timeout=20s"


class Directory(SharedDiskStore):
    """Tier in a directory, the calls of which wait while its gate is closed."""

    def __init__(self, path: Path, **settings: Any) -> None:
        super().__init__(DiskConfig(str(path), settings), look_every_s=0)
        self.lookups, self.reads = threading.Event(), threading.Event()
        self.lookups.set()
        self.reads.set()

    def find(self, digests: Sequence[str]) -> list[EntryInfo | None]:
        self.lookups.wait(WAIT_S)
        return super().find(digests)

    def get(self, key: EntryKey) -> Entry | None:
        self.reads.wait(WAIT_S)
        return super().get(key)


class Recorded(RedisStore):
    """Redis that records its changes."""

    def __init__(self, options: RedisOptions) -> None:
        super().__init__(options)
        self.changes: list[str] = []

    def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        self.changes.append("put")
        return super().put(key, entry, replace=replace)

    def release_claims(self, digests: Sequence[str], owner: bytes) -> None:
        if digests:
            self.changes.append("release")
        super().release_claims(digests, owner)


class Lying(Directory):
    """Tier that finds entries and delivers none."""

    def get(self, key: EntryKey) -> Entry | None:
        return None


class Host:
    """Server of a memory with tiers, and a client."""

    def __init__(self, path: Path, server: ArenaServer) -> None:
        self.path = path
        self.clock = server.clock
        self.store = self.client()

    def client(self) -> ArenaStore:
        return ArenaStore(ArenaOptions(str(self.path), timeout_s=60, verify=1))

    def tier(self, name: str) -> TierStats:
        return self.store._ask(GetStats()).tiers[name]  # noqa: SLF001

    def until(self, name: str, **expected: int) -> None:
        """Wait until the numbers of a tier have these values."""
        wait_for(lambda: all(getattr(self.tier(name), n) == v for n, v in expected.items()))


Start = Callable[..., Host]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(tmp_path: Path, stack: ExitStack) -> Start:
    """Return a function that starts a host with tiers."""
    hosts: list[Host] = []

    def start(tiers: Mapping[str, Tier], size_bytes: int = 16 * MIB, **limits: float) -> Host:
        path = tmp_path / f"{len(hosts)}.sock"
        chosen = TierLimits(**{"lookup_s": WAIT_S, **limits})  # type: ignore[arg-type]
        running = stack.enter_context(serving(path, size_bytes, tiers=tiers, tier_limits=chosen))
        hosts.append(Host(path, running))
        stack.callback(hosts[-1].store.close)
        return hosts[-1]

    return start


def shared(redis: RedisServer, query: str = PATIENCE) -> RedisStore:
    return RedisStore.from_url(redis.url(query))


def put_and_use(host: Host, *names: str) -> None:
    """Write entries, and lease them as the next requests for them do."""
    for name in names:
        assert host.store.put(key(name), entry())
    host.store.lease([key(name) for name in names], 0.001)


def test_an_entry_that_is_used_once_is_not_written_to_the_directory(
    start: Start, tmp_path: Path
) -> None:
    host = start({"file": Directory(tmp_path / "nvme")})
    host.store.put(key("once"), entry())
    assert_same(entry(), host.store.get(key("once")))
    put_and_use(host, "twice")

    host.until("file", sent=1, queued=0)
    with Directory(tmp_path / "nvme") as directory:
        assert [row.info and row.info.key for row in directory.ls()] == [key("twice")]


def test_a_second_read_writes_an_entry_to_the_directory(start: Start, tmp_path: Path) -> None:
    host = start({"file": Directory(tmp_path / "nvme")})
    host.store.put(key(), entry())
    host.store.get(key())
    host.store.get(key())

    host.until("file", sent=1)


def test_a_second_write_writes_an_entry_to_the_directory(start: Start, tmp_path: Path) -> None:
    host = start({"file": Directory(tmp_path / "nvme")}, size_bytes=MIB)
    host.store.put(key(), sized(MIB // 2))
    host.store.put(key("large"), sized(MIB - 8192))
    assert host.store.lookup([key()]) == [None]  # evicted
    host.store.put(key(), sized(MIB // 2))

    host.until("file", sent=1)


@pytest.mark.parametrize(("name", "sent"), [("file", 1), ("redis", 2)])
def test_encode_seconds_are_known_when_an_entry_comes_back(
    start: Start, tmp_path: Path, redis: RedisServer, name: str, sent: int
) -> None:
    tier = shared(redis) if name == "redis" else Directory(tmp_path / "nvme")
    host = start({name: tier}, size_bytes=MIB)
    host.store.put(key(), replace(sized(MIB // 2), encode_s=2.0))
    host.store.lease([key()], 0.001)
    host.until(name, sent=1)

    def has_room() -> bool:
        with suppress(StoreUnavailable):  # while the other entry is sent, or its checksum computed
            return host.store.put(key("large"), sized(MIB - 8192))
        return False

    wait_for(has_room)
    host.until(name, sent=sent)  # it cannot be evicted while it is being sent

    for _ in range(2):
        assert_same(sized(MIB // 2), host.store.get(key()))
    memory = host.store.stats().memory
    assert host.tier(name).fetched == 1
    assert memory is not None
    assert memory.saved_s == 2.0


def test_a_used_entry_counts_as_used_in_the_directory(start: Start, tmp_path: Path) -> None:
    host = start({"file": Directory(tmp_path / "nvme")}, touch_s=0.0)
    put_and_use(host, "name")
    host.until("file", sent=1)
    path = path_of(tmp_path / "nvme", key("name"))
    os.utime(path, (0, path.stat().st_mtime - 1000))
    before_s = path.stat().st_mtime

    host.store.lease([key("name")], 0.001)

    host.until("file", known=1)
    assert path.stat().st_mtime > before_s


def test_an_entry_that_comes_from_the_directory_is_not_written_there_again(
    start: Start, tmp_path: Path
) -> None:
    with Directory(tmp_path / "nvme") as directory:
        directory.put(key(), entry())
    host = start({"file": Directory(tmp_path / "nvme")})
    for _ in range(3):
        assert_same(entry(), host.store.get(key()))
    put_and_use(host, "next")

    host.until("file", sent=1, known=0)


def test_a_restarted_server_has_hits_from_the_directory_at_once(
    tmp_path: Path, stack: ExitStack
) -> None:
    path, limits = tmp_path / "arena.sock", TierLimits(lookup_s=WAIT_S)
    names = [str(number) for number in range(20)]
    keys = [key(name) for name in names]
    with serving(path, tiers={"file": Directory(tmp_path / "nvme")}, tier_limits=limits) as server:
        host = Host(path, server)
        put_and_use(host, *names)
        host.until("file", sent=len(keys))
        host.store.close()
    with serving(path, tiers={"file": Directory(tmp_path / "nvme")}, tier_limits=limits) as server:
        host = Host(path, server)
        assert [info and info.key for info in host.store.lookup(keys)] == keys
        for each in keys:
            assert_same(entry(), host.store.get(each))
        host.store.close()


def test_an_entry_is_looked_up_in_one_tier_after_the_other(
    start: Start, tmp_path: Path, redis: RedisServer
) -> None:
    with Directory(tmp_path / "nvme") as directory, shared(redis) as other:
        directory.put(key("here"), entry())
        other.put(key("there"), sized(100))
        other.put(key("here"), entry())
    host = start({"file": Directory(tmp_path / "nvme"), "redis": shared(redis)})

    found = host.store.lookup([key(name) for name in ("here", "there", "nowhere")])

    assert [info and info.key for info in found] == [key("here"), key("there"), None]
    assert_same(entry(), host.store.get(key("here")))
    assert_same(sized(100), host.store.get(key("there")))
    file, in_redis = host.tier("file"), host.tier("redis")
    assert (file.hits, file.misses, file.fetched) == (1, 2, 1)
    assert (in_redis.hits, in_redis.misses, in_redis.fetched) == (1, 1, 1)


def test_an_entry_of_another_host_reaches_the_directory_at_its_second_use(
    start: Start, tmp_path: Path, redis: RedisServer
) -> None:
    a = start({"redis": shared(redis)})
    b = start({"file": Directory(tmp_path / "nvme"), "redis": shared(redis)})
    a.store.put(key(), entry())
    a.until("redis", sent=1)

    assert_same(entry(), b.store.get(key()))
    assert b.tier("file").sent == 0
    b.store.lease([key()], 0.001)

    b.until("file", sent=1)
    assert b.tier("redis").sent == 0


@pytest.mark.fault(133)
def test_a_full_directory_drops_entries_and_the_next_tier_gets_them(
    start: Start, tmp_path: Path, redis: RedisServer
) -> None:
    host = start({"file": Directory(tmp_path / "nvme", max_bytes=8192), "redis": shared(redis)})
    host.store.put(key("large"), sized(20_000))
    host.store.lease([key("large")], 60)

    host.until("file", drops=1, sent=0)
    host.until("redis", sent=1)
    put_and_use(host, "small", "another", "third")
    host.until("file", sent=3)  # each evicts the one before it
    assert_same(sized(20_000), host.store.get(key("large")))


@pytest.mark.fault(134)
def test_a_directory_that_was_removed_is_created_again(start: Start, tmp_path: Path) -> None:
    host = start({"file": Directory(tmp_path / "nvme")})
    put_and_use(host, "before")
    host.until("file", sent=1)
    (tmp_path / "nvme").rename(tmp_path / "moved")

    assert host.store.lookup([key("missing")]) == [None]
    assert_same(entry(), host.store.get(key("before")))
    put_and_use(host, "after")

    host.until("file", sent=2)
    assert path_of(tmp_path / "nvme", key("after")).exists()


@pytest.mark.fault(134)
def test_a_directory_that_cannot_be_written_costs_no_request(
    start: Start, tmp_path: Path, redis: RedisServer
) -> None:
    with Directory(tmp_path / "nvme") as directory:
        directory.put(key("old"), entry())
    (tmp_path / "file").touch()
    host = start({"file": Directory(tmp_path / "file" / "nvme"), "redis": shared(redis)})
    names = [str(number) for number in range(concurrency.FAILURES + 1)]
    for name in names:
        put_and_use(host, name)

    wait_for(lambda: host.tier("file").drops == len(names) and not host.tier("file").queued)
    assert host.tier("file").errors >= concurrency.FAILURES
    host.until("redis", sent=len(names))
    assert host.store.lookup([key("missing")]) == [None]
    for name in names:
        assert_same(entry(), host.store.get(key(name)))


@pytest.mark.fault(135)
def test_an_entry_that_is_corrupt_in_the_directory_comes_from_the_next_tier(
    start: Start, tmp_path: Path, redis: RedisServer
) -> None:
    with Directory(tmp_path / "nvme") as directory, shared(redis) as other:
        directory.put(key(), sized(MIB))
        other.put(key(), sized(MIB))
    path = path_of(tmp_path / "nvme", key())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    host = start({"file": Directory(tmp_path / "nvme"), "redis": shared(redis)})

    assert host.store.lookup([key()])[0] is not None  # the header is sound
    assert_same(sized(MIB), host.store.get(key()))
    assert (host.tier("file").drops, host.tier("redis").fetched) == (1, 1)
    assert not path.exists()


@pytest.mark.fault(135)
def test_an_entry_that_the_directory_does_not_deliver_comes_from_the_next_tier(
    start: Start, tmp_path: Path, redis: RedisServer
) -> None:
    with Directory(tmp_path / "nvme") as directory, shared(redis) as other:
        directory.put(key(), entry())
        other.put(key(), entry())
    host = start({"file": Lying(tmp_path / "nvme"), "redis": shared(redis)})

    assert_same(entry(), host.store.get(key()))
    assert (host.tier("file").drops, host.tier("redis").fetched) == (1, 1)


@pytest.mark.fault(136)
def test_owners_on_two_hosts_have_a_claim_one_at_a_time(
    start: Start, tmp_path: Path, redis: RedisServer
) -> None:
    a = start({"redis": shared(redis)})
    b = start({"file": Directory(tmp_path / "nvme"), "redis": shared(redis)})

    assert a.store.claim_or_find([key(), key("a")], "a", 60) == [True, True]
    assert b.store.claim_or_find([key(), key("b")], "b", 60) == [False, True]
    assert a.store.claim([key(), key("b")], "a", 60) == [True, False]
    assert (b.tier("redis").claims, b.tier("redis").claimed_elsewhere) == (1, 1)
    assert a.tier("redis").claims == 3  # with the renewal

    a.store.put(key(), entry())
    a.until("redis", sent=1)
    info, _ = b.store.claim_or_find([key(), key("b")], "b", 60)
    assert isinstance(info, EntryInfo)
    a.store.release([key(), key("a")], "a")
    wait_for(lambda: b.store.claim([key("a")], "b", 60) == [True])


@pytest.mark.fault(136)
def test_a_claim_is_released_after_its_entry_was_sent(start: Start, redis: RedisServer) -> None:
    tier = Recorded(redis_options(redis.url(PATIENCE)))
    host = start({"redis": tier})
    assert host.store.claim_or_find([key()], "me", 60) == [True]
    with redis.paused():
        host.store.put(key("before"), entry())
        host.store.put(key(), entry())
        host.store.release([key()], "me")

    wait_for(lambda: len(tier.changes) == 3)
    assert tier.changes == ["put", "put", "release"]


@pytest.mark.fault(136)
def test_hosts_that_miss_the_same_items_at_once_encode_each_once(
    start: Start, redis: RedisServer
) -> None:
    hosts = [start({"redis": shared(redis)}) for _ in range(2)]
    keys = [key(str(number)) for number in range(20)]

    def work(number: int) -> int:
        host, store, encoded = hosts[number % 2], hosts[number % 2].client(), 0
        for each in random.Random(number).sample(keys, len(keys)):  # noqa: S311
            while True:
                [found] = store.claim_or_find([each], f"owner {number}", 30)
                if found is True:
                    encoded += store.put(each, entry())
                    store.release([each], f"owner {number}")
                if found is not False:
                    break
        store.close()
        assert host.tier("redis").claimed_alone == 0
        return encoded

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) == len(keys)
    wait_for(lambda: not any(host.tier("redis").queued for host in hosts))
    assert sum(host.tier("redis").known for host in hosts) == 0


@pytest.mark.fault(137)
def test_a_claim_counts_on_its_host_while_the_shared_tier_hangs(
    start: Start, redis: RedisServer
) -> None:
    a = start({"redis": shared(redis, "timeout=5s")}, lookup_s=0.05)
    b = start({"redis": shared(redis, "timeout=5s")}, lookup_s=0.05)
    with redis.paused():
        assert a.store.claim_or_find([key()], "a", 60) == [True]
        with a.client() as another:
            assert another.claim([key()], "another", 60) == [False]
        assert b.store.claim_or_find([key()], "b", 60) == [True]
        assert a.tier("redis").claimed_alone >= 1
    for host in (a, b):  # both encode it, which is counted
        host.store.put(key(), entry())
    wait_for(lambda: not a.tier("redis").queued and not b.tier("redis").queued)
    wait_for(lambda: a.tier("redis").known + b.tier("redis").known == 1)


@pytest.mark.fault(138)
def test_the_next_tier_answers_while_the_directory_hangs(
    start: Start, tmp_path: Path, redis: RedisServer
) -> None:
    directory = Directory(tmp_path / "nvme")
    with shared(redis) as other:
        other.put(key(), entry())
    host = start({"file": directory, "redis": shared(redis)}, lookup_s=2.0)
    directory.lookups.clear()
    for number in range(concurrency.FAILURES):
        host.store.lookup([key(f"missing {number}")])
    assert host.tier("file").late == concurrency.FAILURES

    assert host.store.lookup([key()])[0] is not None
    assert_same(entry(), host.store.get(key()))
    directory.lookups.set()
    assert host.tier("redis").late == 0


@pytest.mark.fault(138)
def test_look_ups_of_a_tier_that_hangs_have_a_maximum(start: Start, tmp_path: Path) -> None:
    directory = Directory(tmp_path / "nvme")
    host = start({"file": directory}, lookup_s=0.01)
    directory.lookups.clear()
    for number in range(100):
        assert host.store.lookup([key(str(number))]) == [None]

    assert host.tier("file").skipped == 100 - 64
    directory.lookups.set()
    host.until("file", misses=64)


@pytest.mark.fault(139)
def test_an_entry_whose_read_hangs_becomes_a_miss_and_its_place_stays_until_the_read_ends(
    start: Start, tmp_path: Path
) -> None:
    with Directory(tmp_path / "nvme") as other:
        other.put(key(), entry())
    directory = Directory(tmp_path / "nvme")
    host = start({"file": directory}, fetch_s=0.2)
    directory.reads.clear()
    assert host.store.lookup([key()])[0] is not None

    wait_for(lambda: host.store.lookup([key()]) == [None])
    assert host.store.stats().memory.begun_bytes > 0  # type: ignore[union-attr]
    assert host.tier("file").errors == 1
    assert host.store.put(key("other"), entry())
    directory.reads.set()
    wait_for(lambda: host.store.stats().memory.begun_bytes == 0)  # type: ignore[union-attr]


def test_a_deletion_reaches_both_tiers(start: Start, tmp_path: Path, redis: RedisServer) -> None:
    host = start({"file": Directory(tmp_path / "nvme"), "redis": shared(redis)})
    put_and_use(host, "name")
    host.until("file", sent=1)
    host.until("redis", sent=1)

    host.store.delete([key("name")])

    assert host.store.lookup([key("name")]) == [None]
    wait_for(lambda: not path_of(tmp_path / "nvme", key("name")).exists())
    with shared(redis) as other:
        wait_for(lambda: other.lookup([key("name")]) == [None])


def test_a_purge_reaches_both_tiers(start: Start, tmp_path: Path, redis: RedisServer) -> None:
    host = start({"file": Directory(tmp_path / "nvme"), "redis": shared(redis)})
    put_and_use(host, "name")
    host.until("file", sent=1)
    host.until("redis", sent=1)

    host.store.purge(key().namespace)

    assert host.store.lookup([key("name")]) == [None]
    wait_for(lambda: not path_of(tmp_path / "nvme", key("name")).exists())
    with shared(redis) as other:
        wait_for(lambda: other.lookup([key("name")]) == [None])


def test_names_that_are_replaced_stay_in_the_memory(
    start: Start, tmp_path: Path, redis: RedisServer
) -> None:
    host = start({"file": Directory(tmp_path / "nvme"), "redis": shared(redis)})
    host.store.put(key("name"), entry(), replace=True)
    host.store.lease([key("name")], 0.001)
    put_and_use(host, "other")
    host.until("file", sent=1)
    host.until("redis", sent=1)

    assert not path_of(tmp_path / "nvme", key("name")).exists()


@pytest.mark.fault(110)
def test_a_shared_tier_that_is_killed_and_comes_back(start: Start, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as own:
        tiers = {"file": Directory(tmp_path / "nvme"), "redis": RedisStore.from_url(own.url())}
        host = start(tiers, skip_s=0.2)
        own.kill()
        for number in range(5):
            assert host.store.claim_or_find([key(str(number))], "me", 60) == [True]
            put_and_use(host, str(number))
            assert_same(entry(), host.store.get(key(str(number))))
        host.until("file", sent=5)
        assert host.tier("redis").claimed_alone == 5

        own.start()

        def is_back() -> bool:
            name = os.urandom(4).hex()
            with suppress(StoreUnavailable):
                host.store.claim_or_find([key(name)], "me", 60)
                host.store.put(key(name), entry())
            redis = host.tier("redis")
            return redis.claims > 0 and redis.sent > 0

        wait_for(is_back)


def test_a_directory_makes_as_many_system_calls_with_ten_times_the_entries(tmp_path: Path) -> None:
    calls = []
    for size in (200, 2000):
        with SharedDiskStore(DiskConfig(str(tmp_path / str(size)))) as store:
            for number in range(size):
                store.put(key(str(number)), entry())
            counts = []
            for work in (
                lambda: store.find([key("0").digest, key("1").digest]),
                lambda: store.find([key("missing").digest]),
                lambda: store.get(key("2")),
                lambda: store.put(key("new"), entry()),
            ):
                with counted() as counter:
                    work()
                counts.append(sum(counter.values()))
            calls.append(counts)

    small, large = calls
    assert [abs(a - b) <= 4 for a, b in zip(small, large, strict=True)] == [True] * 4, calls


@contextmanager
def claiming(path: Path, tier: Tier, lookup_s: float = 20.0) -> Iterator[ArenaStore]:
    """Serve a memory in front of a shared tier; yield a client of it."""
    limits = TierLimits(lookup_s=lookup_s)
    with (
        serving(path, tiers={"redis": tier}, tier_limits=limits),
        ArenaStore(ArenaOptions(str(path), timeout_s=20)) as store,
    ):
        yield store


@pytest.mark.fault(136)
def test_a_release_that_runs_late_does_not_end_the_next_claim_of_its_owner(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis, ExitStack() as opened:
        one, other = (RedisStore.from_url(redis.url("timeout=20s")) for _ in range(2))
        release, releasing = one.release_claims, threading.Event()

        def release_late(digests: Sequence[str], owner: bytes) -> None:
            releasing.set()
            time.sleep(0.3)
            release(digests, owner)

        one.release_claims = release_late  # type: ignore[method-assign]
        a = opened.enter_context(claiming(tmp_path / "a", one))
        b = opened.enter_context(claiming(tmp_path / "b", other))
        assert a.claim([key()], "a", 30) == [True]
        a.release([key()], "a")
        assert releasing.wait(20)
        assert a.claim([key()], "a", 30) == [True]

        assert b.claim([key()], "b", 30) == [False]
        assert a.claim([key()], "a", 30) == [True]


@pytest.mark.fault(138)
def test_a_claim_that_comes_late_ends_with_its_release(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis, ExitStack() as opened:
        slow, other = (RedisStore.from_url(redis.url("timeout=20s")) for _ in range(2))
        claim = slow.claim_missing

        def claim_late(*args: Any) -> Any:
            time.sleep(0.3)
            return claim(*args)

        slow.claim_missing = claim_late  # type: ignore[method-assign, assignment]
        a = opened.enter_context(claiming(tmp_path / "a", slow, lookup_s=0.01))
        b = opened.enter_context(claiming(tmp_path / "b", other))
        assert a.claim([key()], "a", 30) == [True]
        a.release([key()], "a")

        until(lambda: b.claim([key()], "b", 30) == [True])
