"""Leases of a shared directory, and evictors beside them."""

import time
from pathlib import Path

import pytest

from ec_store import EntryKey, StoreUnavailable
from ec_store.base import LONGEST_S
from ec_store.disk import housekeeping, ledger
from ec_store.disk import store as disk_store
from ec_store.disk.files import Folder
from ec_store.disk.leases import (
    SWEPT_BY_LEASES,
    add_lease,
    lease_folder,
    leased_digests,
    sweep_leases,
)
from ec_store.disk.store import SharedDiskStore
from ec_store.disk.tree import AHEAD_S
from ec_store.testing.stores import another_release, assert_same, entry, key, sized
from tests.ec_store.disk.on_disk import age, entries_bytes, files, opened, path_of
from tests.support.once import after_next, before_next

HOUR = 3600.0


def test_a_leased_entry_survives_eviction_until_the_lease_ends(root: Path) -> None:
    with opened(root, "max_bytes=100KiB") as store:
        store.put(key("leased"), sized(10_000))
        assert store.lease([key("leased")], 2)[0] is not None
        age(path_of(root, key("leased")), 1000)
        for n in range(30):
            # Renewed each time: the writes may take longer than the lease.
            store.lease([key("leased")], 2)
            age(path_of(root, key("leased")), 1000)
            store.put(key(str(n)), sized(10_000))
        assert store.get(key("leased")) is not None
        age(path_of(root, key("leased")), 1000)
        time.sleep(3.1)
        for n in range(30, 50):
            store.put(key(str(n)), sized(10_000))

        assert store.get(key("leased")) is None


@pytest.mark.fault(95)
def test_a_store_full_of_leased_entries_takes_no_more(root: Path) -> None:
    with opened(root, "max_bytes=110KiB") as store:
        keys = [key(str(n)) for n in range(9)]
        for each in keys:
            store.put(each, sized(10_000))
        store.lease(keys, 60)

        with pytest.raises(StoreUnavailable):
            store.put(key("more"), sized(10_000))
        with pytest.raises(StoreUnavailable):
            store.put(key("more"), sized(10_000))
        assert all(store.lookup(keys))
        assert store.stats().drops == 2
        assert store.stats().leased == 9


@pytest.mark.fault(93)
def test_a_put_replaces_no_entry_of_another_format_that_its_readers_lease(root: Path) -> None:
    with opened(root) as store:
        with another_release():
            store.put(key(), sized(100))
        leases = store._opening.tree().leases  # noqa: SLF001
        add_lease(lease_folder(leases, 60, time.time()), key().digest)

        assert store.put(key(), sized(100, 2)) is False
        with another_release():
            assert_same(sized(100), store.get(key()))


@pytest.mark.fault(95)
def test_leased_entries_are_counted_once_until_their_last_lease_ends(root: Path) -> None:
    with opened(root) as store:
        for name in "abc":
            store.put(key(name), sized(100))
        assert store.stats().leased == 0
        for seconds in (1, 60, 600):
            store.lease([key("a")], seconds)
        store.lease([key("b")], 0.1)
        assert store.stats().leased == 2
        time.sleep(2.2)

        assert store.stats().leased == 1
        assert store.stats().bytes == entries_bytes(root)


def test_a_lease_that_comes_while_its_entry_is_evicted_keeps_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lease(_: object) -> None:
        assert other.lease([key("leased")], 60)[0] is not None

    with opened(root) as store, opened(root) as other:
        for name in ("leased", "old"):
            store.put(key(name), entry())
            age(path_of(root, key(name)), HOUR)
        store.configure(max_bytes=1)
        after_next(monkeypatch, housekeeping, "leased_digests", lease)

        assert store.evict() == 1
        assert_same(entry(), other.get(key("leased")))
        assert other.get(key("old")) is None
        assert store.stats().bytes == entries_bytes(root)


def put_just_used(root: Path, store: SharedDiskStore, *keys: EntryKey) -> None:
    """Store entries of which no further use is recorded: an evictor sees only their leases."""
    for each in keys:
        store.put(each, entry())
        age(path_of(root, each), -AHEAD_S / 2)


@pytest.mark.fault(29)
def test_evictor_looks_for_leases_again_after_it_has_locked_its_victims(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lease() -> None:
        assert other.lease([key("leased")], 60)[0] is not None

    with opened(root) as store, opened(root) as other:
        put_just_used(root, store, key("leased"), key("old"))
        store.configure(max_bytes=1)
        before_next(monkeypatch, housekeeping, "try_lock", lease)

        assert store.evict() == 1
        assert_same(entry(), other.get(key("leased")))
        assert other.get(key("old")) is None


@pytest.mark.fault(29)
def test_lease_of_an_entry_that_is_evicted_meanwhile_is_a_miss(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evict() -> None:
        assert other.evict() == 1

    with opened(root) as store, opened(root) as other:
        put_just_used(root, store, key())
        other.configure(max_bytes=1)
        before_next(monkeypatch, disk_store, "try_lock", evict)

        assert store.lease([key()], 60) == [None]
        assert store.get(key()) is None


@pytest.mark.fault(29)
def test_entry_that_is_being_leased_is_not_evicted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evict() -> None:
        assert other.evict() == 0

    with opened(root) as store, opened(root) as other:
        put_just_used(root, store, key())
        other.configure(max_bytes=1)
        before_next(monkeypatch, disk_store, "add_lease", evict)

        assert store.lease([key()], 60)[0] is not None
        assert store.get(key()) is not None


def test_entry_that_is_being_evicted_is_not_leased(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lease() -> None:
        assert other.lease([key()], 60) == [None]

    with opened(root) as store, opened(root) as other:
        put_just_used(root, store, key())
        store.configure(max_bytes=1)
        before_next(monkeypatch, ledger, "remove_locked", lease)

        assert store.evict() == 1


def test_lease_removes_no_more_of_the_ended_ones_than_its_caller_can_wait_for(
    root: Path, store: SharedDiskStore
) -> None:
    store.put(key(), entry())
    leases = Folder.open_path(str(root / "leases"), 0o750)
    ended = [f"{n:064x}" for n in range(3 * SWEPT_BY_LEASES)]
    for then in (time.time() - 60, time.time() - 30):
        for digest in ended:
            add_lease(lease_folder(leases, 1, then), digest)
    before = len(files(root, "leases"))
    store.lease([key()], 1)

    assert len(files(root, "leases")) == before - SWEPT_BY_LEASES + 1
    store.sweep()
    assert len(files(root, "leases")) <= 1


def test_leases_that_ended_are_swept_by_the_next(root: Path, store: SharedDiskStore) -> None:
    store.put(key(), entry())
    for _ in range(4):
        store.lease([key()], 0.1)
        time.sleep(1.1)

    assert len(files(root, "leases")) <= 3


@pytest.mark.parametrize("asked_s", [LONGEST_S + 1, 1e9, 365.25 * 86400 * 1000])
def test_no_lease_ends_later_than_the_longest(root: Path, asked_s: float) -> None:
    with opened(root) as store:
        store.put(key(), sized(10))
        store.lease([key()], asked_s)
        [ending] = [int(path.name) for path in (root / "leases").iterdir()]

        assert LONGEST_S - 5 <= ending - time.time() <= LONGEST_S * 1.125 + 5


def test_lease_of_a_thousand_years_is_ignored_and_swept(root: Path) -> None:
    now_s = time.time()
    folder = Folder.open_path(str(root), 0o750)
    digest = key().digest
    for ending in (now_s + 1.24 * LONGEST_S, now_s + 1.26 * LONGEST_S, now_s + 3e10):
        ended = folder.open_or_create(str(int(ending)))
        ended.create(digest if ending > now_s + 1.25 * LONGEST_S else "0" * 64)

    assert leased_digests(folder, [digest, "0" * 64], now_s) == {"0" * 64}
    sweep_leases(folder, now_s)
    assert folder.names() == [str(int(now_s + 1.24 * LONGEST_S))]
