"""Limits of a shared directory: the age of entries, and their bytes."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ec_store import EntryTooLarge
from ec_store.disk.store import SharedDiskStore
from ec_store.testing.stores import assert_same, entry, key, sized
from tests.ec_store.disk.on_disk import age, entries_bytes, opened, path_of

HOUR = 3600.0


def test_an_entry_that_was_not_used_for_its_ttl_is_a_miss(root: Path) -> None:
    with opened(root, "ttl=1h") as store:
        store.put(key(), sized(10, 1))
        age(path_of(root, key()), HOUR + 60)

        assert store.get(key()) is None
        assert store.lookup([key()]) == [None]
        assert store.put(key(), sized(10, 2)) is True
        assert_same(sized(10, 2), store.get(key()))


@pytest.mark.parametrize("use", ["get", "put", "lease"])
def test_using_an_entry_makes_it_young(root: Path, use: str) -> None:
    with opened(root, "ttl=1h") as store:
        store.put(key(), entry())
        age(path_of(root, key()), HOUR - 60)
        before = path_of(root, key()).stat().st_mtime
        uses: dict[str, Callable[[], object]] = {
            "get": lambda: store.get(key()),
            "put": lambda: store.put(key(), entry()),
            "lease": lambda: store.lease([key()], 5),
        }
        uses[use]()

        assert path_of(root, key()).stat().st_mtime > before + HOUR - 120


def test_lookup_does_not_mark_an_entry_as_used(root: Path, store: SharedDiskStore) -> None:
    store.put(key(), entry())
    age(path_of(root, key()), 600)
    before = path_of(root, key()).stat().st_mtime
    store.lookup([key()])

    assert path_of(root, key()).stat().st_mtime == before


def test_evict_removes_expired_entries(root: Path) -> None:
    with opened(root, "ttl=1h") as store:
        store.put(key("old"), entry())
        store.put(key("new"), entry())
        age(path_of(root, key("old")), 2 * HOUR)

        assert store.evict() == 1
        assert [row.digest for row in store.ls()] == [key("new").digest]
        assert store.stats().evictions == 1
        assert store.stats().entries == 1


def test_writers_sweep_now_and_then_without_being_asked(root: Path) -> None:
    with opened(root, "ttl=200ms") as store:
        store.put(key("old"), entry())
        time.sleep(0.5)
        store.put(key("new"), entry())

        assert not path_of(root, key("old")).exists()


@pytest.mark.fault(27)
def test_an_entry_from_the_future_is_not_kept_for_ever(root: Path, store: SharedDiskStore) -> None:
    store.put(key(), entry())
    age(path_of(root, key()), -1000 * HOUR)

    assert store.evict() == 1


def test_the_least_recently_used_make_room(root: Path) -> None:
    with opened(root, "max_bytes=120KiB") as store:
        for n in range(9):
            store.put(key(str(n)), sized(10_000))
            age(path_of(root, key(str(n))), 1000 - n)
        store.get(key("0"))
        for n in range(9, 12):
            store.put(key(str(n)), sized(10_000))
        there = {n for n in range(12) if store.lookup([key(str(n))])[0]}

        assert entries_bytes(root) <= 120 * 1024
        assert {0, 9, 10, 11} <= there
        assert 1 not in there
        assert store.stats().evictions == 12 - len(there)
        assert store.stats().bytes == entries_bytes(root)


def test_an_entry_above_the_size_limit_is_rejected(root: Path) -> None:
    with opened(root, "max_bytes=10KiB") as store, pytest.raises(EntryTooLarge):
        store.put(key(), sized(20_000))
    with opened(root, "max_entry_bytes=1000") as store, pytest.raises(EntryTooLarge):
        store.put(key(), sized(2_000))
    with opened(root) as store, pytest.raises(EntryTooLarge):
        store.put(key(), entry(metadata={"long": "x" * 2**20}))
