"""Two hosts, each with a memory, and a tier behind both: a real Redis."""

import asyncio
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import TestClient, TestServer
from msgspec import structs

from ec_store import Entry, EntryKey, concurrency
from ec_store.__main__ import main
from ec_store.aio import AsyncStore
from ec_store.arena import tier_link
from ec_store.arena.connection import ArenaConnection
from ec_store.arena.extents import ExtentAllocator
from ec_store.arena.index import ArenaIndex
from ec_store.arena.memory import create_memory
from ec_store.arena.protocol import (
    MAX_REPLY_BYTES,
    VERSION,
    AnyRequest,
    Find,
    Frames,
    GetStats,
    Headers,
    Hello,
    Read,
    Release,
    Reply,
    Stats,
    TierStats,
    encode,
    read_reply,
)
from ec_store.arena.server import ArenaServer, Session
from ec_store.arena.sockets import bind
from ec_store.arena.store import ArenaStore
from ec_store.arena.tier import TierLimits
from ec_store.arena.url import ArenaOptions
from ec_store.entry import EntryInfo
from ec_store.errors import StoreUnavailable
from ec_store.redis.store import RedisStore
from ec_store.service import create_app
from ec_store.testing.stores import assert_same, entry, key, sized
from tests.ec_store.arena.served import MIB, hashed_pin, serving, wait_for
from tests.paths import ROOT
from tests.support.redis_server import RedisServer

WAIT_S = 20.0
"""Longest wait for what happens in the background."""


class Gated(RedisStore):
    """Tier, each call of which waits while its gate is closed; it counts its reads.

    Attributes:
        lookups, reads, writes: gates of `find`, `get` and `put`, open at first.
        answers: gate of the answer of `find`, after Redis has answered.
        removals: gate of `remove` and `purge`.
    """

    def __init__(self, url: str) -> None:
        super().__init__(RedisStore.from_url(url)._options)  # noqa: SLF001
        self.lookups, self.reads = threading.Event(), threading.Event()
        self.writes, self.removals = threading.Event(), threading.Event()
        self.answers = threading.Event()
        self.open_gates()
        self.read: list[EntryKey] = []
        self.lookups_begun = self.lookups_answered = self.removals_begun = 0

    def open_gates(self) -> None:
        for gate in (self.lookups, self.answers, self.reads, self.writes, self.removals):
            gate.set()

    def find(self, digests: Sequence[str]) -> list[EntryInfo | None]:
        self.lookups_begun += 1
        self.lookups.wait(WAIT_S)
        found = super().find(digests)
        self.lookups_answered += 1
        self.answers.wait(WAIT_S)
        return found

    def get(self, key: EntryKey) -> Entry | None:
        self.read.append(key)
        self.reads.wait(WAIT_S)
        return super().get(key)

    def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:
        self.writes.wait(WAIT_S)
        return super().put(key, entry, replace=replace)

    def remove(self, digests: Sequence[str]) -> int:
        self.removals_begun += 1
        self.removals.wait(WAIT_S)
        return super().remove(digests)

    def purge(self, namespace: str) -> int:
        self.removals.wait(WAIT_S)
        return super().purge(namespace)


@dataclass
class Host:
    """Memory of a host with its tier, and a client."""

    path: Path
    tier: Gated
    store: ArenaStore
    limits: TierLimits
    clients: list[ArenaStore] = field(default_factory=list)

    @property
    def stats(self) -> Stats:
        return self.store._ask(GetStats())  # noqa: SLF001

    @property
    def counts(self) -> TierStats:
        return self.stats.tiers["redis"]

    def until(self, **expected: float) -> None:
        """Wait until the numbers of the tier have these values."""
        wait_for(lambda: all(getattr(self.counts, n) == v for n, v in expected.items()))

    def client(self, timeout_s: float = WAIT_S) -> ArenaStore:
        options = ArenaOptions(str(self.path), timeout_s=timeout_s, verify=1)
        self.clients.append(ArenaStore(options))
        return self.clients[-1]

    def close(self) -> None:
        """Open the gates, and close all clients."""
        self.tier.open_gates()
        for client in [self.store, *self.clients]:
            client.close()


Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path, redis: RedisServer) -> Iterator[Start]:
    """Return a function that starts a host; look-ups have the time that a busy machine needs."""
    with ExitStack() as stack:

        def start(
            size_bytes: int = 16 * MIB,
            query: str = "timeout=20s&connect_timeout=20s",
            limits: TierLimits | None = None,
            **options: Any,
        ) -> Host:
            path = tmp_path / f"{len(list(tmp_path.iterdir()))}.sock"
            behind, limits = Gated(redis.url(query)), limits or TierLimits(lookup_s=WAIT_S)
            stack.enter_context(
                serving(path, size_bytes, tiers={"redis": behind}, tier_limits=limits, **options)
            )
            store = ArenaStore(ArenaOptions(str(path), timeout_s=60, verify=1))
            host = Host(path, behind, store, limits)
            stack.callback(host.close)
            return host

        yield start


@pytest.fixture
def a(start: Start) -> Host:
    return start()


@pytest.fixture
def b(start: Start) -> Host:
    return start()


def varied(size_bytes: int) -> Entry:
    """Return an entry of bytes that differ from place to place."""
    return entry(random.Random(size_bytes).randbytes(size_bytes))  # noqa: S311


def spoil_in_redis(redis: RedisServer, spoiled: EntryKey) -> None:
    name = f"epd:ec:{{{spoiled.digest}}}:e2"
    client: Any = redis.client
    value = client.get(name)
    client.setrange(name, len(value) - 1, bytes([value[-1] ^ 1]))


def dbsize(redis: RedisServer) -> int:
    client: Any = redis.client
    return int(client.dbsize())


def in_redis(redis: RedisServer, wanted: EntryKey) -> bool:
    client: Any = redis.client
    return bool(client.exists(f"epd:ec:{{{wanted.digest}}}:e2"))


@pytest.mark.parametrize("size_bytes", [0, 4, 100_000, 5 * MIB])
def test_an_entry_written_on_one_host_is_found_on_another(
    start: Start, a: Host, size_bytes: int
) -> None:
    b = start(segment_bytes=MIB)  # an entry of 5 MiB is in several extents
    written = varied(size_bytes)
    assert a.store.put(key(), written)
    a.until(sent=1, queued=0, queued_bytes=0)

    [info] = b.store.lookup([key()])
    found = b.store.get(key())

    assert info is not None
    assert (info.key, info.shape, info.metadata) == (key(), written.shape, written.metadata)
    assert_same(written, found)
    assert (b.counts.hits, b.counts.fetched) == (1, 1)
    assert b.counts.fetched_bytes == a.counts.sent_bytes == written.data.nbytes
    assert [row.problem for row in b.store.verify()] == [None]


def test_an_entry_in_several_extents_is_sent(start: Start, b: Host) -> None:
    a = start(segment_bytes=MIB)
    a.store.put(key(), varied(5 * MIB))
    a.until(sent=1)

    assert_same(varied(5 * MIB), b.store.get(key()))


def test_a_read_without_a_lookup_finds_an_entry_of_another_host(a: Host, b: Host) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)

    assert_same(entry(), b.store.get(key()))
    assert b.store.get(key("missing")) is None


def test_an_entry_of_another_host_is_not_claimed(a: Host, b: Host) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)

    info, claimed = b.store.claim_or_find([key(), key("missing")], "me", 60)

    assert isinstance(info, EntryInfo)
    assert claimed is True
    assert b.store.claim([key()], "another", 60) == [True]


def test_clients_of_a_host_fetch_an_entry_once(a: Host, b: Host) -> None:
    a.store.put(key(), sized(MIB))
    a.until(sent=1)
    b.tier.reads.clear()
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(b.client().get, key()) for _ in range(8)]
        wait_for(lambda: b.counts.hits)
        b.tier.reads.set()
        found = [read.result() for read in reads]

    for each in found:
        assert_same(sized(MIB), each)
    assert b.tier.read == [key()]
    assert b.counts.fetched == 1


def test_an_entry_that_redis_has_is_not_sent_again(a: Host, b: Host) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)

    assert b.store.put(key(), entry()) is True

    b.until(known=1, sent=0, queued=0)


def test_a_lease_holds_for_an_entry_that_is_coming(a: Host, b: Host) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)
    b.tier.reads.clear()

    assert b.store.lease([key()], 60)[0] is not None
    assert b.stats.leased == 0
    b.tier.reads.set()

    b.until(fetched=1)
    assert b.stats.leased == 1


def test_a_read_waits_for_a_coming_entry_within_its_timeout(a: Host, b: Host) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)
    b.tier.reads.clear()

    assert b.client(timeout_s=1).get(key()) is None
    b.tier.reads.set()
    assert_same(entry(), b.client().get(key()))


@pytest.mark.fault(108)
def test_bytes_that_are_corrupt_in_redis_reach_no_reader(
    redis: RedisServer, a: Host, b: Host
) -> None:
    a.store.put(key(), sized(MIB))
    a.until(sent=1)
    spoil_in_redis(redis, key())

    assert b.store.lookup([key()])[0] is not None  # the header is sound
    assert b.store.get(key()) is None
    assert b.store.lookup([key()]) == [None]
    assert b.counts.fetched == 0
    assert b.stats.memory.begun_bytes == 0
    assert b.counts.found_corrupt == 1
    assert not in_redis(redis, key())
    assert_same(sized(MIB), a.store.get(key()))


@pytest.mark.fault(108)
def test_bytes_that_are_corrupt_in_the_memory_are_not_sent(redis: RedisServer, a: Host) -> None:
    a.tier.lookups.clear()
    a.store.put(key(), entry())
    writer = ArenaConnection(str(a.path), "writer", 10)
    pin, arena = hashed_pin(writer, key())
    [part] = arena.parts(pin.extents, 1)
    part[0] ^= 1
    writer.close()
    a.tier.lookups.set()

    a.until(corrupt=1, sent=0, queued=0)
    assert not in_redis(redis, key())
    assert a.stats.entries == 0


def test_an_entry_that_was_replaced_after_its_look_up_does_not_come(
    redis: RedisServer, a: Host, b: Host
) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)
    b.tier.reads.clear()
    assert b.store.lookup([key()])[0] is not None
    with RedisStore.from_url(redis.url()) as other:
        other.put(key(), entry(metadata={"image_grid_thw": [1, 2, 2]}), replace=True)
    b.tier.reads.set()

    assert b.store.get(key()) is None
    assert b.counts.fetched == 0


@pytest.mark.fault(110)
def test_a_host_serves_while_redis_hangs(redis: RedisServer, start: Start) -> None:
    host = start(query="timeout=100ms", limits=TierLimits(skip_s=0.5))
    with redis.paused():
        numbers = count()
        wait_for(
            lambda: (
                host.store.lookup([key(f"missing {next(numbers)}")]) == [None]
                and host.counts.skipped
            )
        )
        assert host.store.put(key(), entry())
        assert_same(entry(), host.store.get(key()))
        wait_for(lambda: host.counts.drops and not host.counts.queued)

    with RedisStore.from_url(redis.url()) as other:
        other.put(key("other"), entry())
    wait_for(lambda: host.store.lookup([key("other")]) != [None])


@pytest.mark.fault(110)
def test_a_host_serves_while_redis_is_down_and_uses_it_when_it_is_back(
    tmp_path: Path,
) -> None:
    limits = TierLimits(lookup_s=WAIT_S, skip_s=0.2)
    with RedisServer(tmp_path / "redis") as own, ExitStack() as stack:
        behind = RedisStore.from_url(own.url())
        path = tmp_path / "own.sock"
        stack.enter_context(serving(path, tiers={"redis": behind}, tier_limits=limits))
        store = stack.enter_context(ArenaStore(ArenaOptions(str(path), timeout_s=WAIT_S)))
        store.put(key("before"), entry())
        wait_for(lambda: in_redis(own, key("before")))
        own.kill()

        for number in range(10):
            assert store.lookup([key(f"missing {number}")]) == [None]
            assert store.put(key(f"written {number}"), entry())
            assert_same(entry(), store.get(key(f"written {number}")))

        own.start()
        numbers = count()
        wait_for(lambda: store.put(key(f"after {next(numbers)}"), entry()) and dbsize(own))


@pytest.mark.parametrize(
    ("call", "skipped"),
    [("find", "skips_lookups"), ("get", "skips_reads"), ("put", "skips_writes")],
)
def test_the_numbers_of_a_tier_say_which_calls_skip_it(
    redis: RedisServer,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    skipped: str,
) -> None:
    host = start(limits=TierLimits(lookup_s=WAIT_S, skip_s=10 * WAIT_S))
    monkeypatch.setattr(host.tier, call, Mock(side_effect=StoreUnavailable("it is away")))
    with RedisStore.from_url(redis.url()) as other:
        for number in range(concurrency.FAILURES):
            assert host.counts.errors == number
            assert not getattr(host.counts, skipped)
            other.put(key(f"{number}"), entry())
            if call == "put":
                host.store.put(key(f"written {number}"), entry())
            else:
                host.store.lookup([key(f"{number}")])
            host.until(errors=number + 1)

    numbers = structs.asdict(host.counts)
    assert [name for name, value in numbers.items() if name.startswith("skips_") and value] == [
        skipped
    ]


@pytest.mark.fault(110)
def test_a_slow_lookup_delays_its_connection_alone_and_only_until_its_deadline(
    start: Start,
) -> None:
    host = start()
    host.tier.lookups.clear()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(host.client().lookup, [key()])
        assert host.client().stats().entries == 0
        assert host.client().claim([key()], "me", 60) == [True]
        assert not slow.done()
        host.tier.lookups.set()
        assert slow.result() == [None]

    host.limits.lookup_s = 0.05
    host.tier.lookups.clear()
    assert host.store.lookup([key("other")]) == [None]
    assert (host.counts.late, host.counts.errors) == (1, 0)


def test_no_client_waits_for_look_ups_that_are_late_and_what_they_find_is_fetched(
    a: Host, b: Host
) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)
    b.limits.lookup_s = 0.02
    b.tier.lookups.clear()
    for number in range(concurrency.FAILURES):
        assert b.store.lookup([key(f"missing {number}")]) == [None]
    b.limits.lookup_s = 2 * WAIT_S
    assert b.store.lookup([key()]) == [None]
    b.tier.lookups.set()

    b.until(fetched=1, errors=0, late=concurrency.FAILURES + 1, skips_waiting=1)
    assert_same(entry(), b.store.get(key()))


def test_late_look_ups_abandon_no_entry_that_was_found(a: Host, b: Host) -> None:
    found = [key(f"found {number}") for number in range(tier_link.FETCH_THREADS + 1)]
    for each in found:
        a.store.put(each, entry())
    a.until(sent=len(found))
    b.tier.reads.clear()
    assert None not in b.store.lookup(found)

    b.limits.lookup_s = 0.02
    b.tier.lookups.clear()
    for number in range(concurrency.FAILURES + 1):
        assert b.store.lookup([key(f"missing {number}")]) == [None]
    assert b.counts.late == concurrency.FAILURES + 1
    b.tier.reads.set()

    b.until(fetched=len(found), drops=0)


def test_replies_keep_the_order_of_their_requests_while_one_waits_for_the_tier(
    start: Start, a: Host
) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)
    host = start()
    digest = bytes.fromhex(key().digest)
    others: list[AnyRequest] = [GetStats(), Release([digest], b"me")]
    many: list[AnyRequest] = [Find([digest]), *others * 200]
    host.tier.lookups.clear()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(host.path))
        connection.sendall(encode(Hello(VERSION, "proxy")))
        connection.recv(2**16)
        connection.sendall(b"".join(map(encode, many)))
        assert host.client().stats().entries == 0
        host.tier.lookups.set()
        frames, replies = Frames(MAX_REPLY_BYTES), list[Reply]()
        while len(replies) < len(many):
            replies += map(read_reply, frames.split(connection.recv(2**16)))

    [found, *after] = replies
    assert isinstance(found, Headers)
    assert found.headers != [b""]
    assert [type(reply).__name__ for reply in after] == ["Stats", "Done"] * 200


@pytest.mark.parametrize("limits", [TierLimits(queue_entries=3), TierLimits(queue_bytes=3 * 100)])
def test_entries_above_the_queue_are_not_sent(start: Start, limits: TierLimits) -> None:
    a = start(limits=replace(limits, lookup_s=WAIT_S))
    a.tier.lookups.clear()
    a.store.put(key("being sent"), sized(100))
    a.until(queued=0)  # the thread has it
    for number in range(5):
        assert a.store.put(key(str(number)), sized(100))

    assert (a.counts.queued, a.counts.queued_bytes, a.counts.drops) == (3, 300, 2)
    a.tier.lookups.set()
    a.until(sent=4, queued=0, queued_bytes=0, drops=2)


def test_an_entry_that_has_waited_too_long_is_not_sent(start: Start) -> None:
    a = start(limits=TierLimits(queued_s=0.0))
    a.store.put(key(), entry())

    a.until(drops=1, sent=0)


def test_an_entry_that_waits_can_be_evicted(start: Start) -> None:
    a = start(size_bytes=MIB)
    a.tier.lookups.clear()
    a.store.put(key("being sent"), sized(100))
    a.until(queued=0)
    a.store.put(key("waits"), sized(MIB // 2))
    a.store.put(key("large"), sized(MIB - 8192))
    a.tier.lookups.set()

    a.until(sent=2, drops=1)


def test_an_entry_that_is_being_sent_is_not_evicted(start: Start, b: Host) -> None:
    a = start(size_bytes=MIB)
    a.tier.lookups.clear()
    a.store.put(key("being sent"), sized(MIB // 2))
    a.until(queued=0)
    with pytest.raises(StoreUnavailable, match="full"):
        a.store.put(key("large"), sized(MIB - 8192))
    a.tier.lookups.set()
    a.until(sent=1)

    assert a.stats.memory.pinned_bytes == 0
    assert_same(sized(MIB // 2), b.store.get(key("being sent")))


def test_a_full_memory_fetches_nothing(start: Start, a: Host) -> None:
    a.store.put(key(), sized(MIB // 2))
    a.until(sent=1)
    b = start(size_bytes=MIB)
    b.store.put(key("other"), sized(MIB - 8192))
    b.store.lease([key("other")], 60)
    drops = b.counts.drops

    assert b.store.lookup([key()]) == [None]
    assert b.counts.drops == drops + 1
    assert b.tier.read == []


def test_a_deleted_entry_is_deleted_in_the_tier(redis: RedisServer, a: Host, b: Host) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)

    a.tier.removals.clear()
    assert a.store.delete([key()]) == 1
    assert a.store.lookup([key()]) == [None]
    a.tier.removals.set()
    wait_for(lambda: not in_redis(redis, key()))
    assert b.store.lookup([key()]) == [None]


def test_an_entry_that_is_deleted_before_it_is_sent_is_not_in_the_tier(
    redis: RedisServer, a: Host
) -> None:
    a.tier.lookups.clear()
    for name in ("being sent", "waits"):
        a.store.put(key(name), entry())
    a.store.delete([key("being sent"), key("waits")])
    a.tier.lookups.set()
    a.store.put(key("next"), entry())

    wait_for(lambda: in_redis(redis, key("next")))
    assert not in_redis(redis, key("being sent"))
    assert not in_redis(redis, key("waits"))


def test_a_deleted_entry_does_not_come_any_more(a: Host, b: Host) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)
    b.tier.reads.clear()
    assert b.store.lookup([key()])[0] is not None

    b.store.delete([key()])
    assert b.store.lookup([key()]) == [None]
    b.tier.reads.set()

    wait_for(lambda: b.stats.memory.begun_bytes == 0)
    assert b.stats.entries == 0


def test_a_purged_namespace_is_purged_in_the_tier(redis: RedisServer, a: Host, b: Host) -> None:
    other = EntryKey("other", "name")
    for each in (key(), key("coming"), other):
        a.store.put(each, entry())
    a.until(sent=3)
    b.tier.reads.clear()
    assert b.store.lookup([key("coming")])[0] is not None
    b.tier.removals.clear()

    b.store.purge(key().namespace)
    b.tier.reads.set()
    assert b.store.lookup([key(), key("coming")]) == [None, None]
    assert b.store.lookup([other])[0] is not None
    b.tier.removals.set()
    wait_for(lambda: not in_redis(redis, key()) and not in_redis(redis, key("coming")))
    wait_for(lambda: b.stats.memory.begun_bytes == 0)
    assert in_redis(redis, other)
    assert [row.info and row.info.key for row in b.store.ls()] == [other]


def test_a_look_up_after_a_purge_finds_nothing_if_the_tier_purges_meanwhile(
    redis: RedisServer, a: Host, b: Host
) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)
    for gate in (b.tier.removals, b.tier.answers, b.tier.reads):
        gate.clear()
    b.store.purge(key().namespace)
    with ThreadPoolExecutor(1) as pool:
        look_up = pool.submit(b.client().lookup, [key()])
        wait_for(lambda: b.tier.lookups_answered)
        b.tier.removals.set()
        b.store.delete([key("another")])
        wait_for(lambda: b.tier.removals_begun)  # so the purge has ended
        assert not in_redis(redis, key())
        b.tier.answers.set()
        assert look_up.result() == [None]
    b.tier.reads.set()


def test_purges_that_wait_for_the_tier_have_a_maximum(a: Host) -> None:
    a.tier.removals.clear()
    for number in range(tier_link.QUEUE_NAMESPACES + 3):
        a.store.purge(f"namespace-{number}")

    assert a.counts.drops == 3


def test_an_entry_that_is_deleted_during_its_look_up_does_not_come(a: Host, b: Host) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)
    b.tier.lookups.clear()
    b.tier.removals.clear()
    with ThreadPoolExecutor(1) as pool:
        look_up = pool.submit(b.client().lookup, [key()])
        wait_for(lambda: b.tier.lookups_begun)
        b.store.delete([key()])
        b.tier.lookups.set()
        assert look_up.result() == [None]

    assert b.tier.read == []


def test_a_reader_that_looks_again_finds_an_entry_that_is_sent_later(a: Host, b: Host) -> None:
    a.tier.writes.clear()
    a.store.put(key(), entry())
    assert b.store.get(key()) is None
    assert b.store.claim_or_find([key()], "me", 60) == [True]
    a.tier.writes.set()
    a.until(sent=1)

    assert_same(entry(), b.store.get(key()))


def test_a_look_up_asks_the_tier_for_a_bounded_number_of_entries(start: Start) -> None:
    a = start(limits=TierLimits(lookup_s=WAIT_S, max_keys=2))

    assert a.store.lookup([key(str(number)) for number in range(5)]) == [None] * 5
    assert (a.counts.misses, a.counts.skipped) == (2, 3)


async def test_a_request_that_waited_for_the_tier_is_dropped_while_its_connection_closes(
    redis: RedisServer, tmp_path: Path
) -> None:
    server = ArenaServer(create_memory(MIB), ArenaIndex(ExtentAllocator(MIB, MIB)))
    tiers = {"redis": RedisStore.from_url(redis.url())}
    await server.start(bind(tmp_path / "arena.sock", 0o600), tiers)
    before = asyncio.all_tasks()
    session = Session(server)
    session.client.role = "reader"
    transport = Mock(spec=asyncio.Transport)
    client, ours = socket.socketpair()
    transport.get_extra_info.return_value = ours
    session.connection_made(transport)

    session.data_received(encode(Read([bytes(32)])))
    transport.is_closing.return_value = True
    [task] = asyncio.all_tasks() - before
    await task
    await asyncio.sleep(0)

    transport.write.assert_not_called()
    session.connection_lost(None)
    client.close()
    ours.close()
    await server.close()


def test_a_client_that_is_gone_gets_no_pin_after_its_look_up(a: Host, b: Host) -> None:
    a.store.put(key(), entry())
    b.store.put(key("here"), entry())
    a.until(sent=1)
    b.tier.lookups.clear()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(b.path))
        connection.sendall(encode(Hello(VERSION, "reader")))
        connection.recv(2**16)
        digests = [bytes.fromhex(each.digest) for each in (key(), key("here"))]
        connection.sendall(encode(Read(digests)))
        wait_for(lambda: b.stats.memory.clients == 2)
    wait_for(lambda: b.stats.memory.clients == 1)
    b.tier.lookups.set()

    b.until(fetched=1)
    assert b.stats.memory.pinned_bytes == 0


def test_stat_shows_the_numbers_of_the_tier(a: Host, capsys: pytest.CaptureFixture[str]) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)
    with pytest.raises(SystemExit) as ended:
        main(["stat", f"shm://{a.path}"])

    assert ended.value.code == 0
    assert "redis      1 sent, 0 fetched, 0 queued, 0 drops, 0 errors" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["file://STORE", "redis://localhost:1"])
def test_a_tier_is_only_for_the_memory_of_a_host(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", url.replace("STORE", str(tmp_path / "store")), "--tier", "redis://h"])

    assert ended.value.code == 2
    assert "--tier is for the memory of a host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tiers", "problem"),
    [
        (["shm:///another.sock"], "cannot be a tier: use file://, redis:// or mooncake://"),
        (["redis://h", "file:///nvme"], "or both in this order"),
        (["file:///nvme", "file:///other"], "or both in this order"),
        (["redis://h", "rediss://h"], "or both in this order"),
        (["file:///nvme", "redis://h", "rediss://h"], "or both in this order"),
        (["file:///nvme?max_bytes=0"], "max_bytes"),
    ],
)
def test_tiers_that_are_none_or_in_another_order_are_refused(
    tiers: Sequence[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [part for tier in tiers for part in ("--tier", tier)]
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"shm://{tmp_path}/arena.sock", *flags])

    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_an_entry_that_replaces_another_stays_on_its_host(redis: RedisServer, a: Host) -> None:
    a.store.put(key("name"), entry(), replace=True)
    a.store.put(key("other"), entry())
    a.until(sent=1)

    assert not in_redis(redis, key("name"))
    assert in_redis(redis, key("other"))


async def test_the_service_has_a_metric_for_each_number_of_the_tier(
    a: Host,
) -> None:
    a.store.put(key(), entry())
    a.until(sent=1)
    app = create_app(AsyncStore(a.client()), interval_s=60)
    async with TestClient(TestServer(app)) as client, client.get("/metrics") as reply:
        page = await reply.text()

    document = (ROOT / "docs" / "configuration" / "store.md").read_text()
    names = set(re.findall(r"^# TYPE (ec_store_tier_\w+)", page, re.MULTILINE))
    assert 'ec_store_tier_sent_total{tier="redis"} 1.0' in page
    assert {name.removesuffix("_total") for name in names if not name.endswith("_created")} == {
        f"ec_store_tier_{field}" for field in TierStats.__struct_fields__
    }
    assert [name for name in names if f"`{name}" not in document] == []


def test_hosts_that_write_read_and_delete_at_once_get_no_wrong_byte(start: Start) -> None:
    hosts = [start(size_bytes=2 * MIB, segment_bytes=MIB) for _ in range(2)]
    sizes = {key(str(number)): 2 * number * 4001 for number in range(40)}  # 6 MB in all

    def work(seed: int) -> int:
        chosen, found = random.Random(seed), 0  # noqa: S311
        store = hosts[seed % 2].client()
        for _ in range(200):
            one = chosen.choice(list(sizes))
            match chosen.randrange(10):
                case 0:
                    store.delete([one])
                case 1 | 2 | 3:
                    with suppress(StoreUnavailable):  # it is full
                        store.put(one, varied(sizes[one]))
                case 4 | 5:
                    store.lease([one], 0.01)
                case _:
                    read = store.get(one)
                    found += read is not None
                    if read is not None:
                        assert_same(varied(sizes[one]), read)
        return found

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6)))
    for host in hosts:
        assert host.counts.fetched
        assert host.counts.corrupt == host.tier.counts["corrupt"] == 0
        for client in host.clients:
            client.close()  # a client sends its released pins with its next request
        while host.stats.memory.begun_bytes or host.stats.memory.pinned_bytes or host.counts.queued:
            time.sleep(0.005)
        assert [row.problem for row in host.store.verify() if row.problem] == []


def test_a_host_without_a_tier_has_no_numbers_of_one(tmp_path: Path) -> None:
    path = tmp_path / "alone.sock"
    with serving(path), ArenaStore(ArenaOptions(str(path), timeout_s=WAIT_S)) as store:
        assert store.lookup([key()]) == [None]
        assert store._ask(GetStats()).tiers == {}  # noqa: SLF001
