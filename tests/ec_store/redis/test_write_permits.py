"""Writers of large entries: few at once over all processes, and no buffers that stay."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ec_store import StoreUnavailable
from ec_store.redis.client import RedisClient
from ec_store.redis.entries import RedisEntries
from ec_store.redis.store import RedisStore
from ec_store.redis.url import PERMITS, redis_options
from ec_store.redis.write_permits import LARGE_BYTES, WritePermits
from ec_store.testing.stores import assert_same, key, sized
from tests.support.redis_server import RedisServer

MIB = 2**20
WRITERS = 5 * PERMITS
PERMIT_KEYS = [f"epd:ec:writing:{number}" for number in range(PERMITS)]


@pytest.fixture
def store(server: RedisServer, client: Any) -> Iterator[RedisStore]:
    with RedisStore.from_url(server.url("timeout=60s")) as store:
        yield store


@contextmanager
def permits(server: RedisServer, timeout_s: float) -> Iterator[WritePermits]:
    with closing(RedisClient(redis_options(server.url()))) as client:
        yield WritePermits(client, "epd:ec", timeout_s)


def test_few_large_entries_are_written_at_once(
    server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, lock = RedisEntries.write, threading.Lock()
    writing: list[int] = []
    most: list[int] = []

    def counted(self: RedisEntries, *args: Any, **options: Any) -> bool:
        with lock:
            writing.append(1)
            most.append(len(writing))
        time.sleep(0.01)
        try:
            return write(self, *args, **options)
        finally:
            with lock:
                writing.pop()

    monkeypatch.setattr(RedisEntries, "write", counted)
    with ExitStack() as stack:
        stores = [
            stack.enter_context(RedisStore.from_url(server.url("timeout=60s")))
            for _ in range(WRITERS)
        ]
        with ThreadPoolExecutor(WRITERS) as pool:
            put = pool.map(lambda n: stores[n].put(key(f"{n}"), sized(LARGE_BYTES)), range(WRITERS))
            assert list(put) == [True] * WRITERS

    assert max(most) <= PERMITS
    assert client.keys("*writing*") == []
    assert len(client.keys("*:e2")) == WRITERS


@pytest.mark.fault(89)
def test_a_large_entry_without_a_turn_is_dropped_in_time_and_a_small_one_needs_none(
    server: RedisServer, client: Any
) -> None:
    for name in PERMIT_KEYS:
        client.set(name, b"")
    with RedisStore.from_url(server.url("timeout=200ms")) as store:
        with pytest.raises(StoreUnavailable, match="other writers"):
            store.put(key("large"), sized(LARGE_BYTES))
        assert store.put(key("small"), sized(LARGE_BYTES - 2)) is True
        assert store.stats().drops == 1
        client.delete(PERMIT_KEYS[2])
        assert store.lookup([key("large")]) == [None]
    with RedisStore.from_url(server.url("timeout=60s")) as store:
        assert store.put(key("large"), sized(LARGE_BYTES)) is True
    assert client.exists(*PERMIT_KEYS) == PERMITS - 1


def test_a_turn_of_a_killed_writer_expires(server: RedisServer, client: Any) -> None:
    with permits(server, 30.0) as held, held.hold_permit(LARGE_BYTES):
        [name] = client.keys("*writing*")
        assert 0 < client.pttl(name) <= 30_000


def test_an_expired_turn_of_another_writer_is_not_released(
    server: RedisServer, client: Any
) -> None:
    with permits(server, 0.05) as held, held.hold_permit(LARGE_BYTES):
        time.sleep(0.1)
        for name in PERMIT_KEYS:
            client.set(name, b"")

    assert client.exists(*PERMIT_KEYS) == PERMITS


def test_the_server_keeps_no_buffer_for_a_writer(store: RedisStore, client: Any) -> None:
    store.put(key(), sized(16 * MIB))
    kept = [int(one["qbuf"]) + int(one["qbuf-free"]) for one in client.client_list()]

    assert sum(kept) < MIB
    assert_same(sized(16 * MIB), store.get(key()))


@pytest.mark.fault(89)
def test_writers_take_no_more_memory_than_documented(tmp_path: Path) -> None:
    """The rule of docs/redis.md: twice the memory of the largest entry for each permit."""
    size = 8 * MIB - 2048  # the allocator has a class of 8 MiB
    with RedisServer(tmp_path / "redis", {"save": '""'}) as server:
        client: Any = server.client
        used = client.info("memory")["used_memory"]

        def write(n: int) -> None:
            with RedisStore.from_url(server.url("timeout=60s")) as store:
                for number in range(2):
                    store.put(key(f"{n} {number}"), sized(size))

        beside = [0]
        with ThreadPoolExecutor(WRITERS) as pool:
            done = [pool.submit(write, n) for n in range(WRITERS)]
            while not all(future.done() for future in done):
                both = client.pipeline().info("memory").keys("*:e2")
                info, names = both.execute()
                beside.append(info["used_memory"] - used - len(names) * 8 * MIB)

        assert [future.result() for future in done] == [None] * WRITERS
        assert max(beside) <= (2 * PERMITS + 1) * 8 * MIB
