"""Claims in Redis: their round trips and faults."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ec_store import EntryKey, StoreUnavailable
from ec_store.base import LONGEST_S
from ec_store.redis.client import RedisClient
from ec_store.redis.connection import Command, Reply
from ec_store.redis.store import RedisStore
from ec_store.testing.stores import key
from tests.support.redis_server import RedisServer


@pytest.fixture
def in_redis(server: RedisServer, client: Any) -> Iterator[RedisStore]:
    with RedisStore.from_url(server.url()) as store:
        yield store


def name_of(claimed: EntryKey) -> str:
    return f"epd:ec:{{{claimed.digest}}}:c"


def reads(client: Any) -> int:
    return int(client.info("stats")["total_reads_processed"])


def round_trips(client: Any, call: Callable[[], object]) -> int:
    """Return how many reads the server needed for a call, without the reads of INFO."""
    between = -reads(client) + reads(client)
    before = reads(client)
    call()
    return reads(client) - before - between


def test_claims_are_taken_in_one_round_trip_and_renewed_in_two(
    in_redis: RedisStore, client: Any
) -> None:
    keys = [key(str(n)) for n in range(64)]
    in_redis.claim([key("first")], "a", 30)

    assert round_trips(client, lambda: in_redis.claim(keys, "a", 30)) == 1
    assert round_trips(client, lambda: in_redis.claim(keys, "b", 30)) == 1
    assert round_trips(client, lambda: in_redis.claim(keys, "a", 30)) == 2
    assert round_trips(client, lambda: in_redis.release(keys, "a")) == 2
    assert round_trips(client, lambda: in_redis.claim_or_find(keys[:16], "a", 30)) == 1
    in_redis.release(keys, "a")
    assert list(client.scan_iter()) == [name_of(key("first")).encode()]


@pytest.mark.parametrize("seconds", [0, -1, 0.0001, 30, 1e9, float("inf")])
def test_every_claim_in_redis_ends(in_redis: RedisStore, client: Any, seconds: float) -> None:
    for _ in range(2):
        assert in_redis.claim([key()], "a", seconds) == [True]
        left = client.pttl(name_of(key()))
        assert left <= min(max(1, seconds * 1000), LONGEST_S * 1000)
        assert left != -1
        time.sleep(0.01 if seconds < 1 else 0)


def between(
    monkeypatch: pytest.MonkeyPatch, first: str, happens: Callable[[], object]
) -> list[str]:
    """Run `happens` once, just before the first commands that begin with `first` are sent."""
    run = RedisClient.run
    done: list[str] = []

    def watched(self: RedisClient, commands: Sequence[Command], **more: Any) -> list[Reply]:
        if commands and commands[0][0] == first and not done:
            done.append(first)
            happens()
        return run(self, commands, **more)

    monkeypatch.setattr(RedisClient, "run", watched)
    return done


def test_a_renewal_of_a_claim_that_was_just_taken_over_fails(
    in_redis: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_redis.claim([key()], "a", 30)
    done = between(monkeypatch, "PEXPIRE", lambda: client.set(name_of(key()), "other", px=10_000))

    assert in_redis.claim([key()], "a", 20) == [False]
    assert done
    assert client.get(name_of(key())) == b"other"


def test_a_renewal_of_a_claim_that_just_ended_reports_it(
    in_redis: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_redis.claim([key()], "a", 30)
    done = between(monkeypatch, "PEXPIRE", lambda: client.delete(name_of(key())))

    assert in_redis.claim([key()], "a", 20) == [False]
    assert done
    assert in_redis.claim([key()], "a", 20) == [True]


def test_a_foreign_value_under_the_name_of_a_claim_is_not_ours(
    in_redis: RedisStore, client: Any
) -> None:
    client.hset(name_of(key()), "a", "b")

    assert in_redis.claim([key()], "a", 30) == [False]
    in_redis.release([key()], "a")
    assert client.hgetall(name_of(key())) == {b"a": b"b"}


def test_a_claim_with_a_lost_reply_is_held(in_redis: RedisStore, client: Any) -> None:
    client.set(name_of(key()), "a", px=30_000)

    assert in_redis.claim([key()], "a", 30) == [True]


def test_a_server_that_cannot_take_claims_is_unavailable(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, RedisStore.from_url(server.url()) as store:
        store.claim([key("held")], "a", 30)
        server.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="full"):
            store.claim([key()], "a", 30)
        store.release([key("held")], "a")
        server.command("CONFIG", "SET", "maxmemory", "0")
        assert store.claim([key("held")], "b", 30) == [True]
        server.command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailable):
            store.claim([key()], "a", 30)
        server.kill()
        with pytest.raises(StoreUnavailable):
            store.claim([key()], "a", 30)
        with pytest.raises(StoreUnavailable):
            store.release([key()], "a")
