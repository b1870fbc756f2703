"""Stores of conversations: one contract for both backends, and the memory limit."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from epd.config import ProxyConfig
from epd.conversations.conversations import Conversations
from epd.conversations.entry import Basis, ConversationEntry, Fingerprint, StoredBlocks, parse_entry
from epd.conversations.stores import (
    ConversationsInMemory,
    ConversationsInRedis,
    ConversationStore,
    StoreAway,
)
from epd.conversations.turn import Turn
from epd.redis_urls import MAX_CONNECTIONS
from tests.support.redis_server import RedisServer

PARAMS = {
    "do_remote_decode": True,
    "remote_engine_id": "engine",
    "remote_request_id": "r",
    "remote_block_ids": [[1, 2]],
    "remote_host": "d",
    "remote_port": 1,
    "remote_num_tokens": 70,
}
HELD = StoredBlocks(PARAMS, Fingerprint.of_tokens(range(70)), Basis("form", ("picture",)))
FULL = ConversationEntry(1.5, "http://d:1", "http://p:1", HELD)
BARE = ConversationEntry(2.5, "http://d:2")


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ConversationStore]:
    if request.param == "memory":
        yield ConversationsInMemory(100)
        return
    with RedisServer(tmp_path / "redis") as server:
        in_redis = ConversationsInRedis(server.url())
        yield in_redis
        await in_redis.close()


async def test_an_entry_is_taken_once(store: ConversationStore) -> None:
    await store.put("a", b"entry", 60)

    assert await store.take_entry("b") is None
    assert await store.take_entry("a") == b"entry"
    assert await store.take_entry("a") is None


async def test_the_latest_entry_of_a_conversation_counts(store: ConversationStore) -> None:
    await store.put("a", b"one", 60)
    await store.put("a", b"other", 60)

    assert await store.take_entry("a") == b"other"


async def test_an_entry_is_taken_by_one_of_several_concurrent_calls(
    store: ConversationStore,
) -> None:
    await store.put("a", b"entry", 60)
    taken = await asyncio.gather(*(store.take_entry("a") for _ in range(20)))

    assert [one for one in taken if one] == [b"entry"]


async def test_an_expired_entry_is_not_found(store: ConversationStore) -> None:
    await store.put("a", b"entry", 0.02)
    await asyncio.sleep(0.05)

    assert await store.take_entry("a") is None


async def test_a_key_of_another_kind_in_redis_is_a_failure(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        store = ConversationsInRedis(server.url("key=ours"))
        server.client.lpush("ours:b", "a list")
        with pytest.raises(StoreAway):
            await store.take_entry("b")
        await store.close()


async def test_concurrent_turns_share_a_few_connections_to_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        store = ConversationsInRedis(server.url())
        before = server.client.info("stats")["total_connections_received"]
        assert set(await asyncio.gather(*(store.take_entry(str(one)) for one in range(500)))) == {
            None
        }
        since = server.client.info("stats")["total_connections_received"] - before
        assert since <= MAX_CONNECTIONS + 1  # the INFO client may reconnect
        await store.close()


async def test_the_log_names_the_skipped_store_without_its_password() -> None:
    config = ProxyConfig.model_construct(
        conversation_store="redis://me:secret@127.0.0.1:1", conversation_budget_s=30.0
    )
    async with Conversations.open(config) as conversations:
        with capture_logs() as lines:
            for _ in range(4):
                await conversations.begin_turn(Turn("key"), ())

    assert lines == [
        {
            "event": "the conversation store redis://***@127.0.0.1:1 keeps failing, "
            "skipping it for 5 s: ConnectionError",
            "log_level": "warning",
        }
    ]


async def test_an_unreachable_redis_is_logged(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        store = ConversationsInRedis(server.url())
        await store.put("a", b"entry", 60)
        server.kill()
        with pytest.raises(StoreAway):
            await store.take_entry("a")
        with pytest.raises(StoreAway):
            await store.put("a", b"entry", 60)
        await store.close()


def test_a_written_entry_is_parsed_and_an_invalid_one_is_none() -> None:
    assert parse_entry(FULL.to_json()) == FULL
    assert parse_entry(BARE.to_json()) == BARE
    less = {name: value for name, value in PARAMS.items() if name != "remote_num_tokens"}
    of_another = replace(FULL, blocks=replace(HELD, params=less)).to_json()
    for written in (b"", b"{}", b"\xff", b'{"stored_s": 1, "decode": 5}', of_another):
        assert parse_entry(written) is None


def test_an_entry_without_a_url_of_its_instance_is_invalid() -> None:
    anywhere = replace(HELD, params=PARAMS | {"remote_host": "0.0.0.0"})  # noqa: S104 - the value is data, not an address to bind
    entry = replace(FULL, blocks=anywhere)

    assert parse_entry(entry.to_json()) == entry
    assert parse_entry(replace(entry, decode="http://[").to_json()) is None


@pytest.mark.parametrize(("age_s", "known"), [(449.0, True), (451.0, False)])
def test_a_turn_older_than_its_time_to_live_is_stale_in_any_store(
    age_s: float, known: bool
) -> None:
    async def scenario() -> None:
        store, config = ConversationsInMemory(100), ProxyConfig.model_construct()
        conversations = Conversations(store, config, clock=lambda: FULL.stored_s + age_s)
        await store.put("a", FULL.to_json(), 10 * config.conversation_ttl)
        turn = Turn("a")
        await conversations.begin_turn(turn, {FULL.decode})
        assert turn.before == (FULL if known else None)
        assert list(conversations.results) == ([] if known else ["stale"])

    asyncio.run(scenario())


def test_memory_is_bounded_in_bytes_too() -> None:
    async def scenario() -> None:
        store = ConversationsInMemory(100, max_bytes=20)
        for name in "abc":
            await store.put(name, bytes(10), 60)
        assert (store.entry_count, store.dropped_count) == (2, 1)
        assert await store.take_entry("a") is None

    asyncio.run(scenario())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5)),
        st.tuples(st.just("take"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.integers(1, 40)),
    ),
    max_size=60,
)


@given(st.integers(0, 4), STEPS)
def test_memory_keeps_the_latest_unexpired_entries(
    most: int,
    steps: list[tuple[str, int]],
) -> None:
    """ConversationsInMemory behaves like a list of all entries in order of insertion."""

    async def scenario() -> None:
        now, expected = 0.0, list[tuple[int, float, bytes]]()
        store, evicted = ConversationsInMemory(most, clock=lambda: now), 0
        for number, (step, value) in enumerate(steps):
            evicted += len([one for one in expected if one[1] <= now])
            expected = [one for one in expected if one[1] > now]
            if step == "wait":
                now += value
            elif step == "put":
                entry = b"%d" % number
                await store.put(str(value), entry, 50)
                expected = [one for one in expected if one[0] != value]
                expected.append((value, now + 50, entry))
                over = max(0, len(expected) - most)
                evicted, expected = evicted + over, expected[over:]
            else:
                found = [one for one in expected if one[0] == value]
                expected = [one for one in expected if one[0] != value]
                assert await store.take_entry(str(value)) == (found[0][2] if found else None)
            over = len([one for one in expected if one[1] <= now])
            assert store.entry_count == len(expected) - over
            assert store.dropped_count == evicted + over

    asyncio.run(scenario())
