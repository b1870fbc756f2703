"""Entries in Redis: their format, how they are read, and the number of round trips."""

import asyncio
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import redis
from aiohttp.test_utils import TestServer

from ec_store import Entry, EntryKey, EntryTooLarge, StoreUnavailable
from ec_store.aio import AsyncStore
from ec_store.entry import checksum, encode_header
from ec_store.redis.client import RedisClient
from ec_store.redis.connection import RedisConnection, pack_commands
from ec_store.redis.entries import RedisEntries
from ec_store.redis.store import ATTEMPTS, RedisStore
from ec_store.redis.url import redis_options
from ec_store.redis.write_permits import LARGE_BYTES
from ec_store.service import create_app
from ec_store.testing.stores import assert_same, key, sized
from tests.support.once import after_next
from tests.support.redis_server import RedisServer

MIB = 2**20
PICTURE_BYTES = 9_000_000
"""Size of the encoder output of a one-megapixel picture, as in docs/guides/redis.md."""

WEEK_MS = 7 * 86_400_000


@pytest.fixture
def store(server: RedisServer, client: Any) -> Iterator[RedisStore]:
    with RedisStore.from_url(server.url("timeout=30s")) as store:
        yield store


@pytest.fixture
def windowed(server: RedisServer, client: Any) -> Iterator[RedisStore]:
    """Return a store with reads so small that small entries need many."""
    with cut(server, 64) as store:
        yield store


def cut(server: RedisServer, window_bytes: int) -> RedisStore:
    """Open a store that reads entries in windows of a size."""
    return RedisStore(redis_options(server.url("timeout=30s")), window_bytes=window_bytes)


def name_of(one: EntryKey) -> bytes:
    return f"epd:ec:{{{one.digest}}}:e2".encode()


def round_trips(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> int:
    """Return the round trips of a call; commands that are sent together count as one."""
    rounds = []
    run = RedisClient._round  # noqa: SLF001 - each call is one round trip

    def counted(self: RedisClient, commands: Any, *rest: Any) -> Any:
        rounds.extend([1] if commands else [])
        return run(self, commands, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(RedisClient, "_round", counted)
        call()
    return len(rounds)


@pytest.mark.parametrize("length", [10, 5 * MIB])
def test_an_entry_is_one_value_that_expires(store: RedisStore, client: Any, length: int) -> None:
    """The value is a write id and the blob of docs/store-format.md, evicted only as a whole."""
    kept = sized(length)
    store.put(key(), kept)

    assert client.keys() == [name_of(key())]
    assert client.get(name_of(key()))[16:] == encode_header(
        key(), kept, checksum(kept.data)
    ) + bytes(kept.data)
    assert client.pttl(name_of(key())) > 0.9 * WEEK_MS


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_get_of_an_entry_of_exactly_the_first_window(
    server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    kept = sized(1000)
    size = len(encode_header(key(), kept, checksum(kept.data))) + 1000
    with cut(server, size - 1 + extra) as store:
        store.put(key(), kept)

        assert_same(kept, store.get(key()))
        assert round_trips(monkeypatch, lambda: store.get(key())) == (1 if extra else 2)


def test_the_allocator_of_redis_takes_less_than_a_fifth_more(
    store: RedisStore, client: Any
) -> None:
    store.put(key(), sized(PICTURE_BYTES))

    assert client.memory_usage(name_of(key())) < 1.2 * PICTURE_BYTES


def test_entries_of_the_layout_before_are_neither_read_nor_removed(
    store: RedisStore, client: Any
) -> None:
    old = f"epd:ec:{{{key().digest}}}"
    client.set(f"{old}:m", b"ECR1", px=60_000)
    client.set(f"{old}:{'0' * 32}:0", b"chunk", px=60_000)

    assert store.lookup([key()]) == [None]
    assert store.get(key()) is None
    assert store.put(key(), sized(10)) is True
    assert [row.digest for row in store.ls()] == [key().digest]
    assert store.purge("model") == 1
    assert client.dbsize() == 2


@pytest.mark.fault(20)
def test_every_flipped_byte_is_a_miss_and_is_removed(windowed: RedisStore, client: Any) -> None:
    windowed.put(key(), sized(100))
    value = client.get(name_of(key()))
    for misses, place in enumerate(range(16, len(value)), 1):
        flipped = bytearray(value)
        flipped[place] ^= 0x10
        client.set(name_of(key()), bytes(flipped))

        assert windowed.get(key()) is None, place
        assert (windowed.stats().misses, windowed.stats().corrupt) == (misses, misses)
        assert not client.dbsize()
    assert len(value) > 300


@pytest.mark.fault(20)
@pytest.mark.parametrize("opened", ["store", "windowed"])
def test_a_truncated_value_is_a_miss(
    request: pytest.FixtureRequest, client: Any, opened: str
) -> None:
    store: RedisStore = request.getfixturevalue(opened)
    store.put(key(), sized(100))
    value = client.get(name_of(key()))
    cuts = range(0, len(value), 7)
    for length in cuts:
        client.set(name_of(key()), value[:length])
        assert [row.problem for row in store.ls() if not row.problem] == []

        assert store.get(key()) is None, length
    assert store.stats().corrupt == len(cuts)


def test_a_listing_reports_an_entry_longer_than_its_header_states(
    store: RedisStore, client: Any
) -> None:
    store.put(key(), sized(100))
    client.append(name_of(key()), b"x")

    assert [row.problem is None for row in store.ls()] == [False]
    assert [row.problem is None for row in store.verify(fix=True)] == [False]
    assert not client.dbsize()


@pytest.mark.fault(28)
def test_the_entry_of_another_key_is_a_miss(store: RedisStore, client: Any) -> None:
    for length in (10, 2 * MIB):
        store.put(key("theirs"), sized(length))
        client.copy(name_of(key("theirs")), name_of(key()), replace=True)

        assert store.lookup([key()]) == [None]
        assert store.lease([key()], 5) == [None]
        assert [row.problem for row in store.verify()].count("it is another key's entry") == 1
        assert store.get(key()) is None
        assert store.get(key("theirs")) is not None
        store.delete([key("theirs")])
    assert store.stats().corrupt == 2


def test_a_foreign_value_under_an_entrys_name_is_a_miss_and_is_replaced(
    store: RedisStore, client: Any
) -> None:
    client.lpush(name_of(key()), "not ours")

    assert store.lookup([key()]) == [None]
    assert store.get(key()) is None
    client.lpush(name_of(key()), "not ours")
    assert store.put(key(), sized(100)) is True
    assert_same(sized(100), store.get(key()))
    assert client.pttl(name_of(key())) > 0


Change = Callable[[RedisStore, int], object]


def changing(monkeypatch: pytest.MonkeyPatch, store: RedisStore, change: Change, most: int) -> None:
    """Change the entry between the first and the second round trip of a `get`, `most` times."""
    fill = RedisEntries._fill  # noqa: SLF001 - the second round trip
    turns = iter(range(most))

    def changed(self: RedisEntries, *arguments: Any) -> None:
        turn = next(turns, None)
        if turn is not None:
            change(store, turn + 2)
        fill(self, *arguments)

    monkeypatch.setattr(RedisEntries, "_fill", changed)


@pytest.mark.fault(29)
def test_an_entry_replaced_during_a_read_is_read_again(
    windowed: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(store: RedisStore, seed: int) -> None:
        store.put(key(), sized(1000, seed), replace=True)

    windowed.put(key(), sized(1000, 1))
    changing(monkeypatch, windowed, replaced, ATTEMPTS - 1)
    assert_same(sized(1000, ATTEMPTS), windowed.get(key()))

    changing(monkeypatch, windowed, replaced, ATTEMPTS)
    assert windowed.get(key()) is None
    assert windowed.stats().corrupt == 0
    assert windowed.lookup([key()]) != [None]


@pytest.mark.fault(29)
def test_an_entry_evicted_during_a_read_is_a_miss_and_not_corrupt(
    windowed: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    windowed.put(key(), sized(1000, 1))
    changing(monkeypatch, windowed, lambda store, _: store.delete([key()]), 1)

    assert windowed.get(key()) is None
    assert (windowed.stats().misses, windowed.stats().corrupt) == (1, 0)


def test_verify_keeps_an_entry_replaced_during_its_read(
    windowed: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    windowed.put(key(), sized(1000, 1))
    changing(
        monkeypatch,
        windowed,
        lambda store, seed: store.put(key(), sized(1000, seed), replace=True),
        1,
    )

    assert [row.problem for row in windowed.verify(fix=True)] == [None]
    assert_same(sized(1000, 2), windowed.get(key()))


@pytest.mark.fault(29)
def test_an_equal_entry_put_during_a_read_is_not_corrupt(
    windowed: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry was evicted, missed and encoded again: same bytes, different write id."""
    windowed.put(key(), sized(1000))
    run = RedisEntries._fill  # noqa: SLF001 - the second round trip
    gone = iter([True])

    def fill(self: RedisEntries, *arguments: Any) -> None:
        if next(gone, False):
            windowed.delete([key()])
            try:
                run(self, *arguments)
            finally:
                windowed.put(key(), sized(1000))
        run(self, *arguments)

    monkeypatch.setattr(RedisEntries, "_fill", fill)

    assert_same(sized(1000), windowed.get(key()))
    assert windowed.stats().corrupt == 0


def test_a_put_with_a_lost_reply_recognizes_its_own_entry(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = RedisConnection.read
    lost = iter([True])

    def losing(self: RedisConnection) -> Any:
        reply = read(self)
        if reply == b"OK" and next(lost, False):
            raise redis.ConnectionError
        return reply

    monkeypatch.setattr(RedisConnection, "read", losing)

    assert store.put(key(), sized(1000)) is True
    assert next(lost, None) is None
    assert store.put(key(), sized(1000)) is False


@pytest.mark.fault(22)
def test_writers_of_one_key_never_mix(server: RedisServer, client: Any) -> None:
    """The writers delete and write again all the time, so that readers meet many changes."""
    rounds, length = 100, 2000
    allowed = {bytes(sized(length, seed).data) for seed in range(6)}
    stop = threading.Event()

    def write(seed: int) -> None:
        with cut(server, 512) as store:
            for turn in range(rounds):
                store.put(key(), sized(length, seed), replace=turn % 3 == 0)
                if turn % 5 == 0:
                    store.delete([key()])
                time.sleep(0.001)

    def read() -> tuple[int, int, int]:
        wrong = hits = 0
        with cut(server, 512) as store:
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
def test_a_killed_writer_leaves_no_keys(
    server: RedisServer, store: RedisStore, client: Any
) -> None:
    value = encode_header(key(), sized(MIB), checksum(sized(MIB).data)) + bytes(sized(MIB).data)
    sent = b"".join(pack_commands([("SET", name_of(key()), value, "NX", "PX", 60_000)]))
    with socket.create_connection(("127.0.0.1", server.port)) as writer:
        writer.sendall(sent[:-100])

    assert store.get(key()) is None
    assert not client.dbsize()


async def test_the_service_sends_no_command_to_an_idle_store(
    server: RedisServer, client: Any
) -> None:
    for n in range(300):
        client.set(f"epd:ec:{{{key(str(n)).digest}}}:e2", "x")
    app = create_app(AsyncStore(RedisStore.from_url(server.url())), interval_s=0.001)
    looks, enough = iter(range(10)), asyncio.Event()
    loop, sweep = asyncio.get_running_loop(), RedisStore.sweep

    def counted(self: RedisStore, every_s: float) -> int:
        if next(looks, None) is None:
            loop.call_soon_threadsafe(enough.set)
        return sweep(self, every_s)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RedisStore, "sweep", counted)
        before = client.info("stats")["total_commands_processed"]
        async with TestServer(app):
            await asyncio.wait_for(enough.wait(), 60)
        after = client.info("stats")["total_commands_processed"]

    assert after - before == 1  # the first INFO


def test_use_refreshes_the_time_to_live_and_a_lease_is_not_cut_short(
    store: RedisStore, client: Any
) -> None:
    store.put(key(), sized(1000))
    for use in (
        lambda: store.get(key()),
        lambda: store.put(key(), sized(1000)),
        lambda: store.lease([key()], 5),
    ):
        client.pexpire(name_of(key()), 100_000)
        store.lookup([key()])
        assert client.pttl(name_of(key())) <= 100_000
        use()
        assert client.pttl(name_of(key())) > 0.9 * WEEK_MS

    store.lease([key()], 30 * 86_400)
    store.get(key())
    store.put(key(), sized(1000))
    store.lease([key()], 5)
    assert client.pttl(name_of(key())) > 29 * 86_400_000


@pytest.mark.parametrize("seconds", [1.0, 6.9 * 86_400, 7 * 86_400, 8 * 86_400])
def test_a_leased_entry_does_not_expire_during_its_lease(
    store: RedisStore, client: Any, seconds: float
) -> None:
    store.put(key(), sized(10))
    for left_s in (seconds + 100, seconds - 0.5, seconds / 2):
        client.pexpire(name_of(key()), int(left_s * 1000))

        assert store.lease([key()], seconds) == store.lookup([key()])
        assert client.pttl(name_of(key())) > (seconds - 0.5) * 1000


def test_a_leased_entry_evicted_by_redis_is_a_miss(
    store: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key(), sized(10))
    client.pexpire(name_of(key()), 100_000)
    name = name_of(key())
    after_next(monkeypatch, RedisEntries, "parse_infos", lambda _: client.delete(name))

    assert store.lease([key()], 5) == [None]


def test_a_lease_marks_an_entry_as_used(store: RedisStore, client: Any) -> None:
    """Redis has no leases; a touched entry is evicted later under LRU eviction."""
    store.put(key(), sized(1000))
    while client.object("idletime", name_of(key())) < 2:
        time.sleep(0.1)

    store.lease([key()], 5)
    assert client.object("idletime", name_of(key())) < 2


@pytest.mark.fault(27)
def test_an_entry_expires(server: RedisServer, client: Any) -> None:
    with RedisStore.from_url(server.url("ttl=50ms")) as store:
        store.put(key(), sized(1000))
        time.sleep(0.1)

        assert store.get(key()) is None
        assert store.put(key(), sized(1000)) is True


def test_round_trips(store: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def trips(call: Callable[[], object]) -> int:
        return round_trips(monkeypatch, call)

    keys = [key(str(n)) for n in range(64)]
    for length in (1000, 4 * MIB):
        new = key(f"of {length}")
        assert trips(partial(store.lease, [new], 5)) == 1
        assert trips(partial(store.put, new, sized(length))) == (3 if length >= LARGE_BYTES else 1)
        assert trips(partial(store.lease, [new], 5)) == 1
        assert trips(partial(store.put, new, sized(10))) == 1
        assert trips(partial(store.get, new)) == 1 + (length > MIB)
        client.pexpire(name_of(new), 100_000)
        assert trips(partial(store.lease, [new], 5)) == 2
        store.put(keys[0], sized(10))
    assert trips(lambda: store.lookup(keys)) == 1
    assert trips(lambda: store.delete(keys)) == 1


def test_lookup_of_64_keys_is_one_read_of_the_server(store: RedisStore, client: Any) -> None:
    keys = [key(str(n)) for n in range(64)]
    for each in keys:
        store.put(each, sized(1000))

    def reads() -> int:
        return int(client.info("stats")["total_reads_processed"])

    between = -reads() + reads()
    before = reads()

    assert all(store.lookup(keys))
    assert reads() - before - between == 1


def test_a_large_entry_is_read_into_reused_memory(store: RedisStore) -> None:
    """`bytearray(size)` would clear 20 MiB while it holds the GIL."""
    store.put(key(), sized(20 * MIB))
    tracemalloc.start()
    try:
        first = store.get(key())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert first is not None
    place = address(first)
    assert peak < 4 * MIB
    second = store.get(key())
    assert second is not None
    assert address(second) != place
    del first

    third = store.get(key())
    assert third is not None
    assert address(third) == place


def address(found: Entry) -> int:
    return int(np.frombuffer(found.data, np.uint8).ctypes.data)


def test_a_too_large_entry_is_rejected_and_not_read(server: RedisServer, store: RedisStore) -> None:
    store.put(key(), sized(5000))
    with RedisStore.from_url(server.url("max_entry_bytes=4KiB")) as small:
        with pytest.raises(EntryTooLarge):
            small.put(key("other"), sized(5000))
        assert small.get(key()) is None
    assert store.get(key()) is not None


def test_a_value_that_the_server_does_not_take_is_a_drop(
    server: RedisServer, store: RedisStore, client: Any
) -> None:
    client.config_set("proto-max-bulk-len", "1mb")
    try:
        with pytest.raises(StoreUnavailable):
            store.put(key(), sized(2 * MIB))
    finally:
        client.config_set("proto-max-bulk-len", "512mb")
    assert store.get(key()) is None


@pytest.mark.fault(29)
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-random"])
def test_entries_read_under_eviction_are_whole(
    server: RedisServer, client: Any, policy: str
) -> None:
    """The memory is turned over three times; every entry left in Redis must be readable."""
    room, size, names = 24 * MIB, 700_000, random.Random(1)  # noqa: S311
    try:
        with RedisStore.from_url(server.url()) as store:
            store.register_namespace("model", "space")
            client.config_set("maxmemory-policy", policy)
            client.config_set("maxmemory", client.info("memory")["used_memory"] + room)
            keys = [key(str(n)) for n in range(3 * room // size)]
            for n, each in enumerate(keys):
                store.put(each, sized(size, n))
                seed = names.randint(max(0, n - 20), n)
                found = store.get(keys[seed])
                assert found is None or found.data == sized(size, seed).data
            client.config_set("maxmemory", 0)  # otherwise reads would cause evictions
            there = [info is not None for info in store.lookup(keys)]
            readable = [store.get(each) is not None for each in keys]

            assert readable == there
            assert sum(there) * size > room / 2
            assert store.stats().corrupt == 0
            assert client.info("stats")["evicted_keys"] > 0
            if policy == "volatile-lru":
                assert store.namespaces() == {"model": "space"}
    finally:
        client.config_set("maxmemory", 0)
