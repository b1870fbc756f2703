"""Claims of a proxy on a real store: taking, holding and releasing them."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from ec_store import Entry, EntryInfo, EntryKey, Store, StoreUnavailable
from ec_store.aio import AsyncStore
from ec_store.disk.store import SharedDiskStore
from epd.encoder_cache.claims import Claims, EncodeClaim
from epd.encoder_cache.client import EncoderCache
from epd.encoder_cache.lookup import Lookup
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
        claims.end_lookup(lookup)


@asynccontextmanager
async def encoding(
    claims: Claims, name: str, wait_s: float = 0.0
) -> AsyncIterator[tuple[EncodeClaim, EntryInfo | None]]:
    with EncodeClaim(claims, key(name)) as claim:
        yield claim, None if claim.is_held else await claim.wait_for_turn(wait_s)


def key(name: str) -> EntryKey:
    return EntryKey(NAMESPACE, name)


def free(store: Store, *keys: EntryKey) -> bool:
    """Return whether none of the keys is claimed; release them again."""
    claims = store.claim(keys, "asks", 60)
    store.release(keys, "asks")
    return all(claims)


def put(store: Store, key: EntryKey) -> None:
    store.put(key, Entry(memoryview(bytes(16)), "F32", (1, 4), "image", {}))


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
        assert list(look.claimed) == KEYS
        asked = len(calls)
        async with encoding(claims, "a") as (_, found):
            assert found is None
            assert len(calls) == asked

        assert not free(backed.store, KEYS[0])


async def test_claims_go_back_at_once_where_nothing_was_made(backed: Backed, url: str) -> None:
    async with claiming(url, **LASTING) as claims:
        async with looked(claims, "a", "b"), encoding(claims, "a"):
            pass

        await until(lambda: free(backed.store, *KEYS), timeout_s=30)


async def test_a_claim_is_kept_while_an_instance_may_still_write(backed: Backed, url: str) -> None:
    async with claiming(url, **LASTING) as claims:
        async with looked(claims, "a", "b"), encoding(claims, "a") as (turn, _):
            turn.entry_coming = True
        await until(lambda: free(backed.store, KEYS[1]), timeout_s=30)

        assert not free(backed.store, KEYS[0])


async def test_a_claim_goes_back_when_an_instance_has_had_time_to_write(
    backed: Backed, url: str
) -> None:
    async with claiming(url, **LASTING | {"written_within_s": 0.1}) as claims:
        async with looked(claims, "a"), encoding(claims, "a") as (turn, _):
            turn.entry_coming = True

        await until(lambda: free(backed.store, KEYS[0]), timeout_s=30)


@pytest.mark.usefixtures("backed")
async def test_only_items_of_other_requests_and_proxies_are_encoded_elsewhere(url: str) -> None:
    async with claiming(url) as ours, claiming(url) as theirs, looked(theirs, "b"):

        def elsewhere(lookup: Lookup, names: str) -> list[bool]:
            return [ours.is_encoded_elsewhere(key(name), lookup) for name in names]

        async with looked(ours, "a", "b") as first:
            assert elsewhere(first, "ab") == [False, True]
            async with encoding(ours, "a"), looked(ours, "a", "c") as second:  # claims nothing
                assert elsewhere(second, "ac") == [True, False]
        begun = asyncio.create_task(ours.look_up([key("d")]))
        await asyncio.sleep(0)
        async with looked(ours, "d", "e") as later:  # while the other lookup has no answer
            assert elsewhere(later, "de") == [True, False]
        ours.end_lookup(await begun)


async def test_the_second_waiter_repeats_the_lookup(backed: Backed, url: str) -> None:
    """The first request may have had the item encoded since the second looked it up."""
    async with claiming(url) as claims, looked(claims, "a"), looked(claims, "a") as second:
        assert not second.claimed
        async with encoding(claims, "a") as (turn, _):
            turn.entry_coming = True
        put(backed.store, KEYS[0])
        async with encoding(claims, "a") as (_, found):
            assert found is not None


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
                async with encoding(claims, "b") as (place, _):
                    place.entry_coming = True
            await until(lambda: not claims.is_used(KEYS[1]))
        assert [log["task"] for log in logs if "task" in log] == ["claims"]


async def test_a_store_that_takes_no_claims_is_still_looked_into(
    backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> list[bool]:
        raise StoreUnavailable("it cannot be written to")

    put(backed.store, KEYS[0])
    monkeypatch.setattr(SharedDiskStore, "claim", away)
    async with claiming(url) as claims, looked(claims, "a", "b") as look:
        assert list(look.found or {}) == KEYS[:1]
        assert not look.claimed
        async with asyncio.timeout(90), encoding(claims, "b", 3600) as (_, found):
            assert found is None


async def test_a_cache_can_close_while_it_learns_a_namespace(backed: Backed, url: str) -> None:
    async with asyncio.timeout(30):
        for steps in range(4):
            async with opened_cache(url, cache_settings(lease_s=1)) as cache:
                assert cache.namespace("m") == NAMESPACE
                cache.learn_namespace("m", "another")
                for _ in range(steps):
                    await asyncio.sleep(0)


async def test_a_visit_that_fails_as_its_client_leaves_is_not_worth_a_word(
    backed: Backed, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def leaves(cache: EncoderCache) -> None:
        visiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with monkeypatch.context() as patched:
            patched.setattr(AsyncStore, "begin_visit", lambda *_: visiting)
            asking = asyncio.create_task(cache.run_lookup(Lookup(KEYS)))
            await asyncio.sleep(0)
        visiting.set_exception(StoreUnavailable("away"))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    async with opened_cache(url, cache_settings(lease_s=1)) as cache:
        await leaves(cache)
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
