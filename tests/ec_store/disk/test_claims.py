"""Claims of a shared directory: their links, locks and faults."""

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from ec_store import EntryKey, StoreUnavailable
from ec_store.base import LONGEST_S
from ec_store.disk import claims as disk_claims
from ec_store.disk import lock as locks
from ec_store.disk.store import SharedDiskStore
from ec_store.disk.tree import STAGING_S
from ec_store.testing.claims import running
from ec_store.testing.stores import key
from tests.ec_store.disk.on_disk import age, later, opened
from tests.support.once import before_next

FORK = multiprocessing.get_context("fork")


KILLS = 40


def file_of(root: Path, claimed: EntryKey) -> Path:
    return root / "claims" / claimed.digest


def names(root: Path) -> set[str]:
    return {path.name for path in (root / "claims").iterdir()}


def test_claims_are_renewed_with_one_lock_of_their_folder(
    store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key(str(n)) for n in range(64)]
    locked = Mock(wraps=locks.lock)
    monkeypatch.setattr(disk_claims, "lock", locked)
    assert store.claim(keys[:1], "other", 60) == [True]
    assert store.claim(keys, "a", 60) == [False] + [True] * 63
    assert not locked.called

    assert store.claim(keys, "a", 60) == [False] + [True] * 63
    assert locked.call_count == 1


@pytest.mark.parametrize("content", [b"30", b"30 ", b"x owner", b"nan owner", b"\xff\xff \xff"])
@pytest.mark.parametrize("linked", [True, False])
def test_an_invalid_claim_has_no_holder(
    root: Path, store: SharedDiskStore, content: bytes, *, linked: bool
) -> None:
    if linked:
        file_of(root, key()).symlink_to(os.fsdecode(content))
    else:
        file_of(root, key()).write_bytes(content)

    assert store.claim([key()], "a", 30) == [True]
    assert store.claim([key()], "b", 30) == [False]


@pytest.mark.parametrize("seconds", ["inf", "1e300"])
def test_no_claim_is_found_to_live_for_ever(
    root: Path, store: SharedDiskStore, seconds: str
) -> None:
    path = file_of(root, key())
    path.symlink_to(f"{seconds} other")
    assert store.claim([key()], "a", 30) == [False]
    age(path, LONGEST_S + 1)

    assert store.claim([key()], "a", 30) == [True]


@contextmanager
def before_the_lock(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]
) -> Iterator[None]:
    """Run `happens` once, before the folder of claims is locked."""
    changed: list[object] = []
    before_next(monkeypatch, disk_claims, "lock", lambda: changed.append(happens()))
    yield
    assert changed


@pytest.mark.parametrize("meanwhile", ["renewed", "taken over", "released and taken"])
def test_claim_of_another_owner_is_not_replaced(
    root: Path, store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch, meanwhile: str
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
            assert store.claim([key()], "a", 30) == [False]
        assert names(root) == {key().digest}


def test_claim_that_was_released_meanwhile_is_taken(
    root: Path, store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.claim([key()], "a", 30)
    with before_the_lock(monkeypatch, lambda: file_of(root, key()).unlink()):
        assert store.claim([key()], "a", 30) == [True]
    assert names(root) == {key().digest}


@pytest.mark.parametrize("end", [SharedDiskStore.evict, lambda store: store.release([key()], "a")])
def test_claim_that_another_owner_takes_before_its_removal_stays(
    root: Path,
    store: SharedDiskStore,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[SharedDiskStore], object],
) -> None:
    def take_over() -> None:
        age(file_of(root, key()), 31)
        assert other.claim([key()], "other", 30) == [True]

    with opened(root) as other:
        store.claim([key()], "a", 30)
        if end is SharedDiskStore.evict:
            age(file_of(root, key()), 31)
        with before_the_lock(monkeypatch, take_over):
            end(store)
        assert store.claim([key()], "a", 30) == [False]


def test_claims_are_unavailable_while_another_process_keeps_the_folder_locked(
    root: Path, store: SharedDiskStore
) -> None:
    """A process that was stopped within a change: free claims are taken, and no other changes."""
    store.claim([key()], "a", 30)
    fd = os.open(root / "claims", os.O_RDONLY)
    with locks.lock(fd):
        assert store.claim([key("free")], "a", 30) == [True]
        with pytest.raises(StoreUnavailable, match="keeps its claims locked"):
            store.claim([key()], "a", 30)
    os.close(fd)
    assert store.claim([key()], "a", 30) == [True]


@pytest.mark.fault(27)
def test_a_claim_from_the_future_is_ignored(root: Path, store: SharedDiskStore) -> None:
    store.claim([key()], "other", 30)
    age(file_of(root, key()), -3600)

    assert store.claim([key()], "a", 30) == [True]


def test_claims_that_ended_are_swept_and_others_are_not(root: Path, store: SharedDiskStore) -> None:
    store.claim([key(name) for name in ("ended", "live")], "a", 300)
    age(file_of(root, key("ended")), 300 - STAGING_S)
    (root / "claims" / f".{key().digest}.tmp").symlink_to("left by a crash")
    (root / "claims" / "README").write_text("not a claim")
    with later(STAGING_S + 1):
        store.evict()

    assert names(root) == {key("live").digest, "README"}


def test_a_claimer_killed_at_any_instruction_blocks_no_other(root: Path) -> None:
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
        with later(STAGING_S + 1):
            store.evict()

    assert names(root) == set()


def test_claims_that_cannot_be_written_are_unavailable(
    root: Path, store: SharedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.claim([key("held")], "a", 30)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "symlink", Mock(side_effect=full))
    with pytest.raises(StoreUnavailable, match="No space"):
        store.claim([key()], "a", 30)
    assert names(root) == {key("held").digest}
    store.release([key("held")], "a")
    assert names(root) == set()
    store.close()
    with pytest.raises(StoreUnavailable):
        store.claim([key()], "a", 30)
