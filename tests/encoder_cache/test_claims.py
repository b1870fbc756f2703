"""Claims of a proxy on a real store: taking, holding and releasing them."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from ec_store import Entry, EntryKey, Store, StoreUnavailable
from ec_store.disk.store import SharedDiskStore
from epd.encoder_cache.claims import Claim, Claims, Lookup, WaitResult
from epd.encoder_cache.client import EncoderCache
from tests.support.backed import NAMESPACE, Backed, cache_settings, opened_cache
from tests.support.fleet import until

KEYS = [EntryKey(NAMESPACE, name) for name in "ab"]
VISITS = ("lookup", "claim", "claim_or_find", "release", "lease")


LASTING: dict[str, Any] = {"claim_s": 3600.0, "tend_s": 0.1, "written_within_s": 3600.0}
"""Options of claims that last until they are released, at once or when an entry may be written."""


@asynccontextmanager
async def claiming(url: str, **options: Any) -> AsyncIterator[Claims]:
    async with opened_cache(url, cache_settings(lease_s=1)) as cache:
        yield Claims(cache, **options)


@asynccontextmanager
async def looked(claims: Claims, *names: str) -> AsyncIterator[Lookup]:
    lookup = await claims.look_up([key(name) for name in names])
    try:
        yield lookup
    finally:
        claims.give_back(lookup.claimed_keys or ())


def key(name: str) -> EntryKey:
    return EntryKey(NAMESPACE, name)


def free(store: Store, *keys: EntryKey) -> bool:
    """Return whether none of the keys is claimed; release them again."""
    claims = store.claim(keys, "asks", 60)
    store.release(keys, "asks")
    return all(claims)


def put(store: Store, key: EntryKey) -> None:
    store.put(key, Entry(memoryview(bytes(16)), "F32", (1, 4), "image", {}))


def make(claims: Claims, key: EntryKey) -> None:
    """Take the claim of an entry, and end its making: the entry is coming."""
    with taken(claims, key):
        pass


def taken(claims: Claims, key: EntryKey) -> Claim:
    claim = claims.use(key)
    assert claim is not None
    return claim


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the proxy's calls of the store, in order."""
    asked: list[str] = []

    def noting(name: str) -> Any:
        real = getattr(SharedDiskStore, name)

        def call(self: object, *args: Any, **options: Any) -> Any:
            asked.append(name)
            return real(self, *args, **options)

        return call

    for name in VISITS:
        monkeypatch.setattr(SharedDiskStore, name, noting(name))
    return asked


async def test_lookup_claims_missing_entries_without_a_second_call(
    backed: Backed, url: str, calls: list[str]
) -> None:
    async with claiming(url) as claims, looked(claims, "a", "b") as look:
        assert look.claimed_keys == KEYS
        asked = len(calls)
        with taken(claims, KEYS[0]):
            assert len(calls) == asked

            assert not free(backed.store, KEYS[0])


async def test_claims_go_back_at_once_where_nothing_was_made(backed: Backed, url: str) -> None:
    async with claiming(url, **LASTING) as claims:
        async with looked(claims, "a", "b"):
            taken(claims, KEYS[0]).end(entry_coming=False)

        await until(lambda: free(backed.store, *KEYS), timeout_s=30)


async def test_a_claim_is_kept_while_an_instance_may_still_write(backed: Backed, url: str) -> None:
    async with claiming(url, **LASTING) as claims:
        async with looked(claims, "a", "b"):
            make(claims, KEYS[0])
        await until(lambda: free(backed.store, KEYS[1]), timeout_s=30)

        assert not free(backed.store, KEYS[0])


async def test_a_claim_goes_back_when_an_instance_has_had_time_to_write(
    backed: Backed, url: str
) -> None:
    async with claiming(url, **LASTING | {"written_within_s": 0.1}) as claims:
        async with looked(claims, "a"):
            make(claims, KEYS[0])

        await until(lambda: free(backed.store, KEYS[0]), timeout_s=30)


async def test_a_claim_is_unused_until_a_request_makes_its_entry(backed: Backed, url: str) -> None:
    async with claiming(url) as ours, claiming(url) as theirs:
        async with looked(theirs, "b"), looked(ours, "a", "b"), looked(ours, "a"):
            assert [ours.is_unused(one) for one in KEYS] == [True, False]
            claim = taken(ours, KEYS[0])
            assert ours.use(KEYS[0]) is None
            assert not ours.is_unused(KEYS[0])
            claim.end(entry_coming=False)
        await until(lambda: free(backed.store, *KEYS), timeout_s=30)


async def test_a_claim_that_another_request_gave_back_is_claimed_by_the_wait(
    backed: Backed, url: str
) -> None:
    async with claiming(url) as claims:
        async with looked(claims, "a"):
            assert not (await claims.look_up(KEYS[:1])).claimed_keys
        await until(lambda: free(backed.store, KEYS[0]), timeout_s=30)
        assert (await claims.wait(KEYS[0], 3600)).claim is not None
        assert not claims.is_unused(KEYS[0])
        assert not free(backed.store, KEYS[0])


async def test_an_entry_that_was_made_is_found_by_a_later_wait(backed: Backed, url: str) -> None:
    """The other maker may have made it since this one looked it up."""
    async with claiming(url) as claims, looked(claims, "a"), looked(claims, "a"):
        make(claims, KEYS[0])
        waiting = asyncio.create_task(claims.wait(KEYS[0], 3600))
        await asyncio.sleep(0.05)
        put(backed.store, KEYS[0])

        assert (await waiting).entry is not None


async def test_waits_for_one_entry_share_their_lookups(
    backed: Backed, url: str, calls: list[str]
) -> None:
    async with claiming(url) as claims, looked(claims, "a"):
        with taken(claims, KEYS[0]):
            waits = [asyncio.create_task(claims.wait(KEYS[0], 3600)) for _ in range(50)]
            asked = len(calls)
            await asyncio.sleep(0.3)
            polls = (len(calls) - asked) / 3  # a lookup, a claim and a lookup each
            put(backed.store, KEYS[0])
            found = await asyncio.gather(*waits)

        assert all(waited.entry is not None for waited in found)
        assert polls < 50


async def test_no_wait_lasts_for_an_entry_that_did_not_appear(backed: Backed, url: str) -> None:
    """One of the requests that waited makes it, and the others wait for that."""
    limits = {"written_within_s": 0.1, "consumer_wait_s": 0.1}
    async with asyncio.timeout(90), claiming(url, **limits) as claims:
        async with looked(claims, "a", "b"):
            make(claims, KEYS[0])
            other = taken(claims, KEYS[1])
            assert await claims.wait(KEYS[1], 0.04) == WaitResult()
            assert not claims.is_late(KEYS[1])
            claim = (await claims.wait(KEYS[0], 3600)).claim
            assert claim is not None
            assert await claims.wait(KEYS[1], 0.1) == WaitResult()
            assert claims.is_late(KEYS[0])
            assert claims.is_late(KEYS[1])
            assert [await claims.wait(key, 3600) for key in KEYS] == [WaitResult(), WaitResult()]
            claim.end(entry_coming=False)
            other.end(entry_coming=False)
        assert claims.is_late(KEYS[0])
        put(backed.store, KEYS[0])
        async with looked(claims, "a"):
            assert not claims.is_late(KEYS[0])


async def test_a_claim_is_renewed_while_it_is_held(
    backed: Backed, url: str, calls: list[str]
) -> None:
    async with claiming(url, claim_s=3.0, tend_s=0.15) as claims, looked(claims, "a"):
        await until(lambda: calls.count("claim") > 1, timeout_s=30)
        assert not free(backed.store, KEYS[0])


@pytest.mark.fault(73)
async def test_claims_are_maintained_after_an_unexpected_exception(
    backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[str] = []

    async def release(cache: EncoderCache, keys: Any, owner: str) -> None:
        if not raised:
            raised.append(owner)
            raise RuntimeError("injected")
        await released(cache, keys, owner)

    released = EncoderCache.release
    monkeypatch.setattr(EncoderCache, "release", release)
    async with claiming(url, claim_s=0.2, tend_s=0.01) as claims:
        with capture_logs() as logs:
            async with looked(claims, "a"):
                await until(lambda: raised)
                await claims.look_up(KEYS[1:])
                make(claims, KEYS[1])
            await until(lambda: free(backed.store, KEYS[1]))
        assert [log["task"] for log in logs if "task" in log] == ["claims"]


async def test_a_store_that_takes_no_claims_is_still_looked_into(
    backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> list[bool]:
        raise StoreUnavailable("it cannot be written to")

    put(backed.store, KEYS[0])
    monkeypatch.setattr(SharedDiskStore, "claim", away)
    async with claiming(url) as claims, looked(claims, "a", "b") as look:
        assert list(look.entries or {}) == KEYS[:1]
        assert look.claimed_keys is None
        async with asyncio.timeout(90):
            assert await claims.wait(KEYS[1], 3600) == WaitResult()


async def test_a_cache_can_close_while_it_learns_a_namespace(backed: Backed, url: str) -> None:
    async with asyncio.timeout(30):
        for steps in range(4):
            async with opened_cache(url, cache_settings(lease_s=1)) as cache:
                assert cache.namespace("m") == NAMESPACE
                cache.learn_namespace("m", "another")
                for _ in range(steps):
                    await asyncio.sleep(0)


async def test_a_claim_that_fails_after_its_request_has_gone_is_not_logged(
    backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def away(*_: Any) -> list[bool]:
        asked.set()
        answers.wait(30)
        raise StoreUnavailable("away")

    monkeypatch.setattr(SharedDiskStore, "claim_or_find", away)
    async with claiming(url) as claims:
        looking = asyncio.create_task(claims.look_up(KEYS))
        await until(asked.is_set)
        looking.cancel()
        await asyncio.wait([looking])
        answers.set()
        await asyncio.sleep(0.05)
        gc.collect()

    assert "never retrieved" not in caplog.text


async def test_an_entry_found_again_is_not_leased_again(
    backed: Backed, url: str, calls: list[str]
) -> None:
    put(backed.store, KEYS[0])
    async with opened_cache(url, cache_settings(lease_s=3600)) as cache:
        for _ in range(20):
            assert await cache.find_entries(KEYS[:1])
            await asyncio.sleep(0.01)

        assert calls.count("lookup") >= 20
        assert 1 <= calls.count("lease") < 20


async def test_one_request_makes_an_entry_that_is_late_and_the_others_wait_for_it(
    backed: Backed, url: str
) -> None:
    async with (
        asyncio.timeout(60),
        claiming(url, written_within_s=0.1, tend_s=0.05) as claims,
        looked(claims, "a"),
    ):
        make(claims, KEYS[0])
        waits = [asyncio.create_task(claims.wait(KEYS[0], 3600)) for _ in range(5)]
        done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.2)
        assert [task.result().claim is not None for task in done] == [True]
        assert not any(task.done() for task in others)
        put(backed.store, KEYS[0])
        assert all(waited.entry for waited in await asyncio.gather(*others))


async def test_a_lookup_that_is_given_up_keeps_the_claim_of_another_request(
    backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both requests are of this proxy. The second one needs another entry too, so it claims."""
    answers, claim_or_find = threading.Event(), SharedDiskStore.claim_or_find

    def slow(store: SharedDiskStore, keys: Any, *more: Any) -> Any:
        found = claim_or_find(store, keys, *more)
        answers.wait(30)
        return found

    async with claiming(url) as claims, looked(claims, "a"):
        monkeypatch.setattr(SharedDiskStore, "claim_or_find", slow)
        second = asyncio.create_task(claims.look_up(KEYS))
        await until(lambda: not free(backed.store, KEYS[1]), timeout_s=30)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        answers.set()
        await until(lambda: free(backed.store, KEYS[1]), timeout_s=30)
        assert not free(backed.store, KEYS[0])
