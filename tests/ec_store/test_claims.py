"""Faults of claims, on disk and in Redis."""

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ec_store import EntryKey, StoreUnavailable
from ec_store.base import LONGEST_CLAIM_S
from ec_store.disk import claims as disk_claims
from ec_store.disk import lock as locks
from ec_store.disk import tree
from ec_store.disk.store import SharedDiskStore
from ec_store.redis.client import RedisClient
from ec_store.redis.connection import Command, Reply
from ec_store.redis.store import RedisStore
from tests.ec_store.claims_contract import running
from tests.ec_store.contract import key
from tests.support.redis_server import RedisServer

FORK = multiprocessing.get_context("fork")
KILLS = 40


@pytest.fixture
def disk(root: Path) -> Iterator[SharedDiskStore]:
    with opened(root) as store:
        yield store


@pytest.fixture
def in_redis(server: RedisServer, client: Any) -> Iterator[RedisStore]:
    with RedisStore.from_url(server.url()) as store:
        yield store


def opened(root: Path) -> SharedDiskStore:
    return SharedDiskStore.from_url(root.as_uri())


def file_of(root: Path, claimed: EntryKey) -> Path:
    return root / "claims" / claimed.digest


def age(path: Path, seconds: float) -> None:
    then = path.lstat().st_mtime - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def names(root: Path) -> set[str]:
    return {path.name for path in (root / "claims").iterdir()}


# On disk


def test_claims_are_renewed_with_one_lock_of_their_folder(
    disk: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key(str(n)) for n in range(64)]
    locked = []

    def lock(fd: int) -> AbstractContextManager[None]:
        locked.append(fd)
        return locks.lock(fd)

    monkeypatch.setattr(disk_claims, "lock", lock)
    assert disk.claim(keys[:1], "other", 60) == [True]
    assert disk.claim(keys, "a", 60) == [False] + [True] * 63
    assert not locked

    assert disk.claim(keys, "a", 60) == [False] + [True] * 63
    assert len(locked) == 1


@pytest.mark.parametrize("content", [b"30", b"30 ", b"x owner", b"nan owner", b"\xff\xff \xff"])
@pytest.mark.parametrize("linked", [True, False])
def test_an_invalid_claim_has_no_holder(
    root: Path, disk: SharedDiskStore, content: bytes, *, linked: bool
) -> None:
    if linked:
        file_of(root, key()).symlink_to(os.fsdecode(content))
    else:
        file_of(root, key()).write_bytes(content)

    assert disk.claim([key()], "a", 30) == [True]
    assert disk.claim([key()], "b", 30) == [False]


@pytest.mark.parametrize("seconds", ["inf", "1e300"])
def test_no_claim_is_found_to_live_for_ever(
    root: Path, disk: SharedDiskStore, seconds: str
) -> None:
    path = file_of(root, key())
    path.symlink_to(f"{seconds} other")
    assert disk.claim([key()], "a", 30) == [False]
    age(path, LONGEST_CLAIM_S + 1)

    assert disk.claim([key()], "a", 30) == [True]


@contextmanager
def before_the_lock(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]
) -> Iterator[None]:
    """Run `happens` once, before the folder of claims is locked."""
    changed = []

    def locked_later(fd: int) -> AbstractContextManager[None]:
        monkeypatch.setattr(disk_claims, "lock", locks.lock)
        happens()
        changed.append(fd)
        return locks.lock(fd)

    monkeypatch.setattr(disk_claims, "lock", locked_later)
    yield
    assert changed


@pytest.mark.parametrize("meanwhile", ["renewed", "taken over", "released and taken"])
def test_claim_of_another_owner_is_not_replaced(
    root: Path, disk: SharedDiskStore, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    def take() -> None:
        if meanwhile == "released and taken":
            other.release([key()], "holder")
        owner = "holder" if meanwhile == "renewed" else "other"
        assert other.claim([key()], owner, 30) == [True]

    with opened(root) as other:
        other.claim([key()], "holder", 30)
        age(file_of(root, key()), 31)
        with before_the_lock(monkeypatch, take):
            assert disk.claim([key()], "a", 30) == [False]
        assert names(root) == {key().digest}


def test_claim_that_was_released_meanwhile_is_taken(
    root: Path, disk: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.claim([key()], "a", 30)
    with before_the_lock(monkeypatch, lambda: file_of(root, key()).unlink()):
        assert disk.claim([key()], "a", 30) == [True]
    assert names(root) == {key().digest}


@pytest.mark.parametrize("end", [SharedDiskStore.evict, lambda disk: disk.release([key()], "a")])
def test_claim_that_another_owner_takes_before_its_removal_stays(
    root: Path,
    disk: SharedDiskStore,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[SharedDiskStore], object],
) -> None:
    def take_over() -> None:
        age(file_of(root, key()), 31)
        assert other.claim([key()], "other", 30) == [True]

    with opened(root) as other:
        disk.claim([key()], "a", 30)
        if end is SharedDiskStore.evict:
            age(file_of(root, key()), 31)
        with before_the_lock(monkeypatch, take_over):
            end(disk)
        assert disk.claim([key()], "a", 30) == [False]


def test_claims_are_unavailable_while_another_process_keeps_the_folder_locked(
    root: Path, disk: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped within a change: free claims are taken, and no other changes."""
    monkeypatch.setattr(locks, "BUSY_S", 0.01)
    disk.claim([key()], "a", 30)
    fd = os.open(root / "claims", os.O_RDONLY)
    with locks.lock(fd):
        assert disk.claim([key("free")], "a", 30) == [True]
        with pytest.raises(StoreUnavailable, match="keeps its claims locked"):
            disk.claim([key()], "a", 30)
    os.close(fd)
    assert disk.claim([key()], "a", 30) == [True]


@pytest.mark.fault(27)
def test_a_claim_from_the_future_is_ignored(root: Path, disk: SharedDiskStore) -> None:
    disk.claim([key()], "other", 30)
    age(file_of(root, key()), -3600)

    assert disk.claim([key()], "a", 30) == [True]


def test_claims_that_ended_are_swept_and_others_are_not(
    root: Path, disk: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.claim([key(name) for name in ("ended", "live")], "a", 30)
    age(file_of(root, key("ended")), 31)
    (root / "claims" / f".{key().digest}.tmp").symlink_to("left by a crash")
    (root / "claims" / "README").write_text("not a claim")
    monkeypatch.setattr(tree, "STAGING_S", -1)
    disk.evict()

    assert names(root) == {key("live").digest, "README"}


def test_a_claimer_killed_at_any_instruction_blocks_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "STAGING_S", -1)
    chance = random.Random(1)  # noqa: S311

    def claim_again_and_again() -> None:
        with opened(root) as store:
            while True:
                if all(store.claim([key()], "dead", 0.01)):
                    store.release([key()], "dead")

    with opened(root) as store:
        for _ in range(KILLS):
            with running([FORK.Process(target=claim_again_and_again)]):
                time.sleep(0.01 + chance.random() / 100)
            deadline = time.monotonic() + 60
            while store.claim([key()], "b", 30) != [True]:
                assert time.monotonic() < deadline
            store.release([key()], "b")
        store.evict()

    assert names(root) == set()


def test_claims_that_cannot_be_written_are_unavailable(
    root: Path, disk: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.claim([key("held")], "a", 30)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "symlink", full)
    with pytest.raises(StoreUnavailable, match="No space"):
        disk.claim([key()], "a", 30)
    assert names(root) == {key("held").digest}
    disk.release([key("held")], "a")
    assert names(root) == set()
    disk.close()
    with pytest.raises(StoreUnavailable):
        disk.claim([key()], "a", 30)


# In Redis


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
        assert left <= min(max(1, seconds * 1000), LONGEST_CLAIM_S * 1000)
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
