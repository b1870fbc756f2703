"""What is read while a client reads the page, and what it costs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from ec_store.base import StoreStats
from epd.encoder_cache.client import EncoderCache
from epd.routing.instances import Instance, Role
from epd.routing.table import InstanceTable
from epd.ui.engine_use import EngineUses
from epd.ui.readings import FORGET_AFTER, MAX_ASKED, MAX_STORES, STORE_S, VERSION_S, Readings
from epd.upstream import Upstream, WholeReply
from tests.ui.states import Clock

STATS = StoreStats(3, 700, 1000, 0, 0, 0, 0, 0, 0, 0)


class FakeCache:
    """Client of a store that answers as a test says."""

    def __init__(self) -> None:
        self.reads = 0
        self.open_circuits = {"store_questions": False}
        self.answer: Callable[[], Awaitable[StoreStats | None]] = self.answers

    async def stats(self) -> StoreStats | None:
        self.reads += 1
        return await self.answer()

    async def answers(self) -> StoreStats | None:
        return STATS

    async def fails(self) -> StoreStats | None:
        return None

    async def breaks(self) -> StoreStats | None:
        raise KeyError("maxmemory")

    async def hangs(self) -> StoreStats | None:
        await asyncio.Event().wait()
        return None


class FakeUpstream:
    """Instances that tell their version, or hang."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hung = False

    async def fetch(self, url: str, **_: object) -> WholeReply:
        self.asked.append(url)
        if self.hung:
            await asyncio.Event().wait()
        return WholeReply(200, {}, b'{"version": "0.33.0"}')


class Parts:
    def __init__(self, instances: int = 1, stores: int = 1) -> None:
        self.clock = Clock()
        self.upstream = FakeUpstream()
        self.caches = {f"shm+tcp://h{number}:7000": FakeCache() for number in range(stores)}
        table = InstanceTable(Instance(Role.DECODE, f"http://d:{n}") for n in range(instances))
        self.readings = Readings(
            table,
            cast("Upstream", self.upstream),
            lambda: cast("dict[str, EncoderCache]", self.caches),
            EngineUses(self.clock),
            self.clock,
        )

    @property
    def cache(self) -> FakeCache:
        [cache] = self.caches.values()
        return cache

    async def stores(self) -> list[Any]:
        looked = await self.readings.look()
        await asyncio.sleep(0)  # the reads that it has begun
        return list(looked.stores)


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    parts = Parts()
    async with parts.readings:
        yield parts


async def test_the_first_look_waits_for_a_store_that_answers(parts: Parts) -> None:
    [store] = await parts.stores()

    assert (store["name"], store["known"], store["entries"]) == ("h0:7000", True, 3)
    assert (store["bytes"], store["max_bytes"]) == (700, 1000)
    # The evictions of a store without a server are those of other processes.
    assert (store["evictions"], store["refused"]) == (None, None)


async def test_a_store_is_read_at_an_interval_for_any_number_of_looks(parts: Parts) -> None:
    for _ in range(50):
        await parts.readings.look()
    assert parts.cache.reads == 1
    parts.clock.now_s += STORE_S
    for _ in range(50):
        await parts.stores()

    assert parts.cache.reads == 2


async def test_readings_are_made_only_for_a_look(parts: Parts) -> None:
    parts.clock.now_s += 100 * VERSION_S
    await asyncio.sleep(0.01)

    assert parts.cache.reads == 0
    assert parts.upstream.asked == []


async def test_a_store_that_hangs_is_unknown_and_has_one_read(parts: Parts) -> None:
    assert (await parts.stores())[0]["known"]
    parts.cache.answer = parts.cache.hangs
    parts.clock.now_s += STORE_S
    assert (await parts.stores())[0]["known"]  # as it was last read
    for _ in range(20):
        parts.clock.now_s += STORE_S
        [store] = await parts.stores()
        assert not store["known"]
        assert store["entries"] is None

    assert parts.cache.reads == 2


async def test_a_store_that_fails_is_unknown_until_it_answers(parts: Parts) -> None:
    parts.cache.answer = parts.cache.fails
    assert not (await parts.stores())[0]["known"]
    parts.cache.answer = parts.cache.answers
    parts.clock.now_s += STORE_S
    assert not (await parts.stores())[0]["known"]  # it does not wait for the read

    assert (await parts.stores())[0]["known"]


async def test_a_store_is_unknown_after_an_unexpected_exception(parts: Parts) -> None:
    assert (await parts.stores())[0]["known"]
    parts.cache.answer = parts.cache.breaks
    for _ in range(2):
        parts.clock.now_s += STORE_S
        await parts.stores()

    assert not (await parts.stores())[0]["known"]


async def test_a_store_that_requests_bypass_is_still_read(parts: Parts) -> None:
    parts.cache.open_circuits["store_questions"] = True
    [store] = await parts.stores()

    assert (store["known"], store["bypassed"]) == (True, True)


async def test_a_value_of_an_earlier_reader_is_not_shown(parts: Parts) -> None:
    await parts.readings.look()
    parts.cache.answer = parts.cache.fails
    parts.clock.now_s += FORGET_AFTER * STORE_S

    assert not (await parts.stores())[0]["known"]


async def test_each_host_has_a_row_and_the_rows_are_bounded() -> None:
    parts = Parts(stores=MAX_STORES + 1)
    async with parts.readings:
        assert len(await parts.stores()) == MAX_STORES
        parts.caches = dict([*parts.caches.items()][:2])

        assert [store["name"] for store in await parts.stores()] == ["h0:7000", "h1:7000"]


@pytest.mark.parametrize(("instances", "asked"), [(3, 3), (MAX_ASKED + 8, MAX_ASKED)])
async def test_instances_are_asked_for_their_version_some_at_once(
    instances: int, asked: int
) -> None:
    parts = Parts(instances)
    parts.upstream.hung = True
    async with parts.readings:
        for _ in range(3):
            await parts.readings.look()
        assert len(parts.upstream.asked) == asked


async def test_versions_are_asked_for_at_an_interval() -> None:
    parts = Parts(3)
    async with parts.readings:
        for _ in range(3):
            engines = (await parts.readings.look()).engines
            parts.clock.now_s += STORE_S
        assert {engine["version"] for engine in engines.values()} == {"0.33.0"}
        assert len(parts.upstream.asked) == 3
        parts.clock.now_s += VERSION_S
        await parts.readings.look()
        await asyncio.sleep(0)

        assert len(parts.upstream.asked) == 6
