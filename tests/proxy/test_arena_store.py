"""The proxy with the memory of a host: messages on its event loop, and a server that fails."""

import asyncio
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from ec_store import Entry, EntryInfo, EntryKey, Store, open_store
from ec_store.arena.aio_store import AsyncArenaStore
from ec_store.arena.protocol import AnyRequest, ClaimKeys, Find, Release, Reply
from ec_store.arena.server import ArenaServer, Session
from epd.encoder_cache.claims import Claims
from tests.ec_store.arena.served import Serve, serving
from tests.encoder_cache.test_claims import (  # noqa: F401
    test_a_cache_can_close_while_it_learns_a_namespace,
    test_a_claim_goes_back_when_an_instance_has_had_time_to_write,
    test_a_claim_is_kept_while_an_instance_may_still_write,
    test_a_claim_is_unused_until_a_request_makes_its_entry,
    test_an_entry_that_was_made_is_found_by_a_later_wait,
    test_claims_go_back_at_once_where_nothing_was_made,
)
from tests.proxy.test_encoder_cache import (  # noqa: F401
    test_a_hit_beside_a_video_is_sent_raw_and_not_encoded_again,
    test_a_model_that_the_store_does_not_name_is_learnt_from_its_encoder,
    test_a_picture_seen_before_costs_no_encode_and_no_upload,
    test_a_refused_request_without_its_media_is_not_retried,
    test_an_abandoned_encode_is_cancelled,
    test_proxies_on_one_store_encode_a_new_picture_once,
    test_requests_at_once_for_a_new_picture_are_one_encode,
    test_sources_of_items_are_counted_and_logged,
    test_the_namespace_is_followed_when_it_changes,
    test_the_wait_for_a_claim_of_a_dead_holder_is_bounded,
)
from tests.proxy.test_media import (  # noqa: F401
    test_a_media_name_belongs_to_one_tenant,
    test_a_media_name_without_its_entry_is_a_404,
    test_a_name_given_in_a_conversation_is_known_from_then_on,
    test_a_name_refers_to_the_latest_media,
    test_forgotten_media_are_not_known_any_more,
    test_media_may_be_uploaded_first_and_then_named,
    test_raw_and_named_items_of_a_request,
)
from tests.requests import image, request
from tests.support.backed import (
    NAMESPACE,
    Backed,
    cache_settings,
    caching,
    items_of,
    opened_cache,
    refresh_stores,
    registered,
)
from tests.support.fake_instance import decodes, encodes
from tests.support.fleet import Fleet, Launch, until

KEYS = [EntryKey(NAMESPACE, name) for name in "abc"]
R = TypeVar("R", bound=AnyRequest)
PICTURES = [image(content) for content in (b"1", b"2", b"3")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena.sock"


@pytest.fixture
def server(path: Path) -> Iterator[ArenaServer]:
    with serving(path) as server:
        yield server


@pytest.fixture
def url(path: Path, server: ArenaServer) -> str:
    return f"shm://{path}?timeout=20s"


@pytest.fixture
def requests(server: ArenaServer, monkeypatch: pytest.MonkeyPatch) -> list[AnyRequest]:
    """Return the requests of the proxies, in their order."""
    received: list[AnyRequest] = []
    answer = ArenaServer.answer

    def noted(
        self: ArenaServer, session: Session, request: AnyRequest, *more: Collection[bytes]
    ) -> Reply | None:
        if session.client.role == "proxy":
            received.append(request)
        return answer(self, session, request, *more)

    monkeypatch.setattr(ArenaServer, "answer", noted)
    return received


def of(kind: type[R], requests: list[AnyRequest]) -> list[R]:
    return [each for each in requests if isinstance(each, kind)]


def put(store: Store, key: EntryKey) -> None:
    store.put(key, Entry(memoryview(bytes(16)), "F32", (1, 4), "image", {}))


async def test_all_items_of_a_request_are_one_message_for_each_step(
    launch: Launch, backed: Backed, url: str, requests: list[AnyRequest]
) -> None:
    async with caching(launch, backed, url) as fleet:
        assert await items_of(fleet, request(*PICTURES)) == {"encoded": 3}
        await asyncio.gather(*backed.writes)
        await until(lambda: of(Release, requests))
        [(claimed, find)] = [(each.digests, each.find) for each in of(ClaimKeys, requests)]
        [released] = [each.digests for each in of(Release, requests)]
        assert (len(claimed), find) == (3, True)
        assert sorted(released) == sorted(claimed)
        requests.clear()

        assert await items_of(fleet, request(*PICTURES)) == {"hit": 3}
        await until(lambda: len(of(Find, requests)) == 2)
        [leased] = [each.digests for each in of(Find, requests) if each.seconds]
        [looked_up] = [each.digests for each in of(Find, requests) if not each.seconds]
        assert looked_up == leased == claimed


async def test_found_entries_are_leased(backed: Backed, url: str) -> None:
    put(backed.store, KEYS[0])
    async with opened_cache(url, cache_settings(lease_s=60)) as cache:
        assert set(await cache.find_entries(KEYS) or ()) == {KEYS[0]}
        await until(lambda: backed.store.stats().leased == 1)


async def test_a_lookup_needs_no_thread(backed: Backed, url: str) -> None:
    async with opened_cache(url, cache_settings(lease_s=60)) as cache:
        before = set(threading.enumerate())
        claims = Claims(cache)
        lookup = await claims.look_up(KEYS)
        claims.give_back(KEYS)

        assert lookup.claimed_keys == KEYS
        assert set(threading.enumerate()) <= before


async def test_a_claim_of_another_proxy_is_not_taken(backed: Backed, url: str) -> None:
    put(backed.store, KEYS[0])
    backed.store.claim(KEYS[1:2], "another", 60)
    async with opened_cache(url, cache_settings(lease_s=60)) as cache:
        lookup = await Claims(cache).look_up(KEYS)

        assert list(lookup.entries or ()) == KEYS[:1]
        assert lookup.claimed_keys == KEYS[2:]


@pytest.mark.fault(113)
@pytest.mark.parametrize("how", ["late", "cancelled"])
async def test_a_claim_without_a_waiter_is_released(
    path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message may have claimed. The proxy keeps its connection, with all other claims."""

    async def miss(*_: object, **__: object) -> dict[EntryKey, EntryInfo]:
        return {}  # the lookup was answered before the server hung

    released, release = list[Sequence[EntryKey]](), AsyncArenaStore.release

    async def noted(store: AsyncArenaStore, keys: Sequence[EntryKey], owner: str) -> None:
        await release(store, keys, owner)
        released.append(keys)

    monkeypatch.setattr(AsyncArenaStore, "release", noted)
    with Serve(path) as child, open_store(f"shm://{path}?timeout=20s") as store:
        await until(lambda: registered(store))
        async with opened_cache(f"shm://{path}?timeout=20s", cache_settings(60)) as cache:
            claims, other = Claims(cache), [EntryKey(NAMESPACE, "held")]
            assert (await claims.look_up(other, patient=True)).claimed_keys == other
            monkeypatch.setattr(cache, "find_entries", miss)
            child.signal(signal.SIGSTOP)
            looking = asyncio.create_task(claims.look_up(KEYS))
            if how == "late":
                assert (await looking).claimed_keys is None
            else:
                await asyncio.sleep(0.05)
                looking.cancel()
                await asyncio.wait([looking])
            child.signal(signal.SIGCONT)
            await until(lambda: released == [KEYS])

            await until(lambda: all(store.claim(KEYS, "another", 60)))
            assert store.claim(other, "another", 60) == [False]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the proxy use a store again soon after failures."""
    refresh_stores(monkeypatch, 0.2, skip_s=0.2)


async def is_hit(fleet: Fleet, backed: Backed) -> None:
    """Send a picture until its entry is found."""
    async with asyncio.timeout(60):
        while await items_of(fleet, request(image())) != {"hit": 1}:
            await asyncio.gather(*backed.writes)


async def is_served_without_store(fleet: Fleet) -> None:
    """Send pictures, for which instances that need no store make outputs."""
    usual = fleet.e.chat, fleet.d.chat
    fleet.e.chat, fleet.d.chat = encodes, decodes
    async with asyncio.timeout(30):
        for _ in range(5):
            assert await items_of(fleet, request(image())) == {"encoded": 1}
    fleet.e.chat, fleet.d.chat = usual


@pytest.mark.fault(113)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("timeout_s", [60, 0.2], ids=["late replies", "a new connection"])
async def test_a_server_that_hangs_costs_the_budget_and_is_used_again(
    launch: Launch, path: Path, tmp_path: Path, timeout_s: float
) -> None:
    with Serve(path) as child, open_store(f"shm://{path}?timeout=20s") as store:
        await until(lambda: registered(store))
        backed = Backed(store, tmp_path)
        url = f"shm://{path}?timeout={timeout_s}s"
        async with caching(launch, backed, url, ec_store_budget_s=0.05) as fleet:
            await is_hit(fleet, backed)
            child.signal(signal.SIGSTOP)
            await is_served_without_store(fleet)
            child.signal(signal.SIGCONT)
            await is_hit(fleet, backed)


@pytest.mark.fault(112)
@pytest.mark.usefixtures("impatient")
async def test_a_server_that_is_killed_and_started_again_is_used_again(
    launch: Launch, path: Path, tmp_path: Path
) -> None:
    url = f"shm://{path}?timeout=20s"
    with ExitStack() as stack:
        child = stack.enter_context(Serve(path))
        store = stack.enter_context(open_store(url))
        await until(lambda: registered(store))
        backed = Backed(store, tmp_path)
        async with caching(launch, backed, url) as fleet:
            await is_hit(fleet, backed)
            child.kill()
            await is_served_without_store(fleet)
            stack.enter_context(Serve(path))
            await until(lambda: registered(store))
            await is_hit(fleet, backed)


async def test_a_store_without_a_server_is_logged_and_then_used(path: Path) -> None:
    with capture_logs() as lines, ExitStack() as stack:
        settings = cache_settings(lease_s=60)
        async with opened_cache(f"shm://{path}", settings, refresh_s=0.05) as cache:
            await until(lambda: cache.operations["open", "error"] > 2)
            assert await cache.find_entries(KEYS) is None
            stack.enter_context(serving(path))
            await until(lambda: len(lines) == 2)
            assert await cache.find_entries(KEYS) == {}

    assert [line["event"] for line in lines] == [
        "the encoder store is unavailable",
        "the encoder store can be used",
    ]
    assert str(path) in lines[0]["reason"]
