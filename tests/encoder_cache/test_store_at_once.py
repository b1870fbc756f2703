"""Store in memory: lookups and claims run on the event loop, everything else on threads."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ec_store import Entry, EntryInfo, EntryKey, Store, StoreUnavailable
from ec_store.disk.store import SharedDiskStore
from epd.encoder_cache.at_once import MOST_KEYS, AtOnce
from epd.encoder_cache.client import EncoderCache
from epd.encoder_cache.lookup import Lookup
from tests.support.backed import NAMESPACE, cache_settings, opened_cache
from tests.support.fleet import until

STORED, MISSING = EntryKey(NAMESPACE, "stored"), EntryKey(NAMESPACE, "missing")


class Seen:
    """Record of calls: whether each ran on the event loop's thread, and whether claims wait."""

    def __init__(self) -> None:
        self.look_ups: list[bool] = []
        self.claims: list[tuple[bool, bool]] = []
        self.behaves: Callable[[bool], None] = lambda _: None
        self._loop_thread = threading.get_ident()

    def here(self) -> bool:
        return threading.get_ident() == self._loop_thread


@pytest.fixture
def seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Return the record of calls of a store that reports to be in memory."""
    store.put(STORED, Entry(memoryview(bytes(16)), "F32", (1, 4), "image", {}))
    found, claim = SharedDiskStore.lookup, SharedDiskStore.claim
    calls = Seen()

    def lookup(self: SharedDiskStore, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        calls.look_ups.append(calls.here())
        calls.behaves(calls.here())
        return found(self, keys)

    def claiming(self: SharedDiskStore, *args: Any, wait: bool = True) -> list[bool]:
        calls.claims.append((calls.here(), wait))
        return claim(self, *args, wait=wait)

    monkeypatch.setattr(SharedDiskStore, "lookup", lookup)
    monkeypatch.setattr(SharedDiskStore, "claim", claiming)
    monkeypatch.setattr(SharedDiskStore, "in_memory", True)
    return calls


def opened(url: str, **settings: float) -> EncoderCache:
    """Return the client of a store that is slow only after some time, for a busy machine."""
    return opened_cache(url, cache_settings(**settings), at_once=AtOnce(slow_s=0.05))


def begin_change(url: str) -> None:
    """Leave the only claim in the middle of a change by another process."""
    [claim] = Path(url.removeprefix("file://").partition("?")[0]).glob("claims/*")
    claim.with_name(f"{claim.name}.next").symlink_to("-")


async def trust(cache: EncoderCache, seen: Seen) -> None:
    """Look up until the proxy does so on the event loop."""
    async with asyncio.timeout(20):
        while True not in seen.look_ups:
            assert await cache.find_entries([STORED])
    seen.look_ups.clear()


async def test_fast_lookups_move_from_threads_to_the_loop(url: str, seen: Seen) -> None:
    async with opened(url, lease_s=60) as cache:
        assert await cache.find_entries([STORED])
        assert seen.look_ups == [False]
        await trust(cache, seen)

        assert cache.operations["lookup", "ok"] >= 2


async def test_claims_on_the_event_loop_do_not_wait(url: str, seen: Seen) -> None:
    async with opened(url, lease_s=60) as cache:
        await trust(cache, seen)
        look = Lookup([STORED, MISSING], "owner", 10.0)
        await cache.run_lookup(look)

        assert look.claimed == [MISSING]
        assert list(look.found or ()) == [STORED]
        assert (seen.look_ups, seen.claims) == ([True], [(True, False)])


async def test_claims_on_threads_wait(url: str, seen: Seen) -> None:
    async with opened(url, lease_s=60) as cache:
        look = Lookup([STORED, MISSING], "owner", 10.0)
        await cache.run_lookup(look)

        assert look.claimed == [MISSING]
        # The claim is followed by a second lookup.
        assert (seen.look_ups, seen.claims) == ([False, False], [(False, True)])


async def test_a_claim_on_the_event_loop_is_not_taken_while_another_process_changes_it(
    url: str, store: Store, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request then waits for its turn, as if another proxy held the claim."""

    def slept(_: float) -> None:
        raise AssertionError("a claim blocked the event loop")

    async with opened(url, lease_s=60) as cache:
        await trust(cache, seen)
        assert store.claim([MISSING], "ended", 0.001) == [True]
        begin_change(url)
        await asyncio.sleep(0.01)
        monkeypatch.setattr(time, "sleep", slept)
        look = Lookup([MISSING], "owner", 10.0)
        await cache.run_lookup(look)

        assert (look.claimed, look.settled, look.problem) == ([], True, None)
        assert seen.claims[1:] == [(True, False)]  # the first claim is the test's


@pytest.mark.parametrize("count", [MOST_KEYS, MOST_KEYS + 1])
async def test_claims_are_released_on_the_event_loop_unless_there_are_many(
    url: str, store: Store, seen: Seen, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    releases: list[tuple[bool, int]] = []
    release = SharedDiskStore.release

    def releasing(self: SharedDiskStore, keys: Sequence[EntryKey], owner: str) -> None:
        releases.append((seen.here(), len(keys)))
        release(self, keys, owner)

    keys = [EntryKey(NAMESPACE, str(number)) for number in range(count)]
    assert all(store.claim(keys, "owner", 60))
    monkeypatch.setattr(SharedDiskStore, "release", releasing)
    async with opened(url, lease_s=60) as cache:
        await cache.release(keys[:1], "other")  # no lookup has been fast yet
        await trust(cache, seen)
        await cache.release(keys, "owner")

    assert releases == [(False, 1), (count <= MOST_KEYS, count)]
    assert all(store.claim(keys, "another", 60))


async def test_a_claim_that_fails_on_the_event_loop_leaves_the_answer(
    url: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> list[bool]:
        raise StoreUnavailable("read-only")

    async with opened(url, lease_s=60) as cache:
        await trust(cache, seen)
        monkeypatch.setattr(SharedDiskStore, "claim", fails)
        look = Lookup([STORED, MISSING], "owner", 10.0)
        await cache.run_lookup(look)

        assert (list(look.found or ()), look.claimed) == ([STORED], ())
        assert cache.operations["claim", "error"] == 1


async def test_a_slow_lookup_on_the_loop_moves_the_next_ones_to_threads(
    url: str, seen: Seen
) -> None:
    def slow(here: bool) -> None:
        if here:
            time.sleep(0.5)

    async with opened(url, lease_s=60) as cache:
        await trust(cache, seen)
        seen.behaves = slow
        for _ in range(3):
            assert await cache.find_entries([STORED])

        assert seen.look_ups == [True, False, False]


async def test_lookups_stay_on_threads_while_they_hang(url: str, seen: Seen) -> None:
    go = threading.Event()
    seen.behaves = lambda here: None if here else (go.wait(60), None)[1]
    async with opened(url, lease_s=60, budget_s=0.02) as cache:
        try:
            assert [await cache.find_entries([STORED]) for _ in range(5)] == [None] * 5
        finally:
            go.set()

        assert True not in seen.look_ups


async def test_a_cancelled_lookup_does_not_count_as_slow(url: str, seen: Seen) -> None:
    go = threading.Event()
    seen.behaves = lambda here: None if here else (go.wait(60), None)[1]
    async with opened(url, lease_s=60) as cache:
        try:
            looking = asyncio.create_task(cache.find_entries([STORED], patient=True))
            await until(lambda: seen.look_ups)
            looking.cancel()
            await asyncio.wait([looking])
        finally:
            go.set()
        seen.behaves = lambda _: None
        assert await cache.find_entries([STORED])  # on a thread, since it finishes first
        seen.look_ups.clear()
        assert await cache.find_entries([STORED])

        assert looking.cancelled()
        assert seen.look_ups == [True]


async def test_a_failed_lookup_on_the_loop_is_counted(url: str, seen: Seen) -> None:
    def fails(_: bool) -> None:
        raise StoreUnavailable("gone")

    async with opened(url, lease_s=60) as cache:
        await trust(cache, seen)
        seen.behaves = fails
        assert [await cache.find_entries([STORED]) for _ in range(4)] == [None] * 4

        assert seen.look_ups == [True] * 3
        assert cache.operations["lookup", "error"] == 3
        assert cache.operations["lookup", "skipped"] == 1


async def test_a_store_on_a_disk_is_read_only_on_threads(
    url: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedDiskStore, "in_memory", False)
    async with opened(url, lease_s=60) as cache:
        for _ in range(10):
            assert await cache.find_entries([STORED])

    assert seen.look_ups == [False] * 10


async def test_entries_found_on_the_loop_are_leased(url: str, seen: Seen) -> None:
    async with opened(url, lease_s=60) as cache:
        await trust(cache, seen)
        await until(lambda: cache.operations["lease", "ok"])
