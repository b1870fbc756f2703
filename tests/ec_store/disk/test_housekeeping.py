"""Eviction of a shared directory: its cost, the entries it keeps, and concurrent evictors."""

import errno
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ec_store import StoreUnavailable
from ec_store.disk import housekeeping, ledger
from ec_store.disk.entry_files import EntryFiles
from ec_store.disk.eviction_policy import EvictionCandidate, taken_bytes
from ec_store.disk.store import SharedDiskStore
from ec_store.testing.stores import key, sized
from tests.ec_store.disk.on_disk import (
    age,
    counted,
    entries_bytes,
    files,
    folder_of,
    opened,
    path_of,
)
from tests.ec_store.disk.test_ledger import charge, release, stopped
from tests.support.once import after_next, before_next

BLOCK = 4096


def fill(root: Path, number: int, size: int = 100) -> None:
    """Create entry files that eviction sees, without writing each through a store."""
    for _ in range(number):
        digest = secrets.token_hex(32)
        folder = root / "entries" / digest[:2] / digest[2:4]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / digest).write_bytes(bytes(size))
        used_s = time.time() - 10_000 * secrets.randbelow(1000) / 1000
        os.utime(folder / digest, (used_s, used_s))
    charge(folder_of(root), number * taken_bytes(size), number)


@pytest.fixture(scope="module", params=[3_000, 30_000])
def filled(request: pytest.FixtureRequest) -> Iterator[tuple[Path, int]]:
    # In memory: to delete the folders of 30,000 entries from a disk takes half a minute.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        root = Path(parent) / "store"
        with opened(root):
            fill(root, request.param)
        yield root, request.param


def test_cost_of_a_put_into_a_full_store_does_not_grow_with_entries(
    filled: tuple[Path, int],
) -> None:
    root, number = filled
    with opened(root) as store:
        store.configure(max_bytes=number * BLOCK)
        store.put(key("first"), sized(100))
        with counted() as counts:
            for n in range(16):
                store.put(key(f"{number}-{n}"), sized(100))
        stats = store.stats()

    assert stats.drops == 0
    assert 16 <= stats.evictions <= 64
    assert stats.bytes is not None
    assert stats.bytes <= number * BLOCK
    # At most two evictions with two samples of 64 each; a leaf has half an entry to a dozen.
    assert counts["seen"] <= 16 * 40
    assert counts.total() <= 16 * 180


def test_eviction_of_none_or_one_reads_few_entries(
    filled: tuple[Path, int],
) -> None:
    root, number = filled
    with opened(root) as store:
        store.configure(max_bytes=100 * number * BLOCK)
        store.evict()
        with counted() as counts:
            assert store.evict() == 0

    assert counts["seen"] <= 24
    assert counts.total() <= 200


@pytest.mark.changes_files
def test_put_costs_the_same_beside_many_writers(root: Path) -> None:
    totals = []
    with opened(root) as store:
        usage = folder_of(root)
        for writers in (1, 63, 256):
            for _ in range(writers):
                charge(usage, 10)
            store.put(key(f"warm-{writers}"), sized(100))
            of_puts = []
            for number in range(3):  # other threads of this process may do I/O beside one of them
                with counted() as counts:
                    store.put(key(f"{writers}-{number}"), sized(100))
                of_puts.append(counts.total())
            totals.append(min(of_puts))

    assert max(totals) - min(totals) <= 4  # a folder may have to be created
    assert max(totals) < 40


def test_sweep_removes_expired_entries_and_corrects_the_ledger(root: Path) -> None:
    with opened(root, "ttl=1h") as store:
        for n in range(60):
            store.put(key(str(n)), sized(100))
            if n % 3:
                age(path_of(root, key(str(n))), 7200)
        usage = folder_of(root)
        charge(usage, 99 * BLOCK, 99)

        assert store.sweep() == 40
        assert store.stats().entries == len(list(store.ls())) == 20
        assert store.stats().bytes == entries_bytes(root)
        for _ in range(15):
            release(usage, BLOCK)
        assert store.sweep(every_s=3600) == 0
        assert store.stats().entries == 5
        assert store.sweep() == 0
        assert store.stats().entries == 20


def test_put_observes_the_time_of_each_of_its_evictions(root: Path) -> None:
    with opened(root, "max_bytes=64KiB") as store:
        for n in range(12):
            store.put(key(str(n)), sized(100))
        assert store.counts.take_observations() == {}
        for n in range(12, 48):
            store.put(key(str(n)), sized(100))
        observed = store.counts.take_observations()
        evictions = store.stats().evictions

    assert list(observed) == ["eviction_seconds"]
    assert 1 <= len(observed["eviction_seconds"]) <= evictions
    assert min(observed["eviction_seconds"]) > 0


def test_eviction_with_nothing_to_free_is_not_observed(root: Path) -> None:
    with opened(root, "ttl=1h") as store:
        for n in range(4):
            store.put(key(str(n)), sized(100))
            age(path_of(root, key(str(n))), 7200)
        store.evict()

        assert store.sweep() + store.stats().evictions >= 4
        assert store.counts.take_observations() == {}


def choosing(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[Sequence[EvictionCandidate]], None]
) -> None:
    """Call `then` once, after victims are chosen and before any is removed."""
    after_next(monkeypatch, housekeeping, "choose_victims", then)


def test_entry_read_after_its_selection_is_not_evicted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(root) as store, opened(root) as reader:
        for name, age_s in (("read", 7200), ("unread", 3600), ("younger", 1800)):
            store.put(key(name), sized(100))
            age(path_of(root, key(name)), age_s)
        store.configure(max_bytes=BLOCK + 400)  # room for one
        choosing(monkeypatch, lambda _: assert_there(reader, "read"))

        assert store.evict() == 2
        assert store.get(key("read")) is not None
        assert store.lookup([key("unread"), key("younger")]) == [None, None]
        assert store.stats().bytes == entries_bytes(root)


def assert_there(store: SharedDiskStore, name: str) -> None:
    assert store.get(key(name)) is not None


def test_entry_that_replaced_a_corrupt_one_is_not_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(root) as store, opened(root) as other:
        store.put(key(), sized(100, 1))
        path_of(root, key()).write_bytes(b"no entry")
        before_next(
            monkeypatch,
            EntryFiles,
            "load",
            lambda: other.put(key(), sized(100, 2), replace=True),
        )

        assert store.get(key()) is None
        assert store.stats().corrupt == 0
        found = other.get(key())
        assert found is not None
        assert found.data == sized(100, 2).data


@pytest.mark.parametrize("ahead_s", [10, 4000])
def test_sweep_runs_if_the_last_one_is_far_ahead_of_the_clock(root: Path, ahead_s: float) -> None:
    with opened(root) as store:
        store.sweep()
        age(root / "swept", -ahead_s)
        store.sweep(every_s=3600)

        runs = (root / "swept").stat().st_mtime < time.time() + 5
        assert runs == (ahead_s > 3600)


TEN = [key(str(n)) for n in range(10)]


def fill_ten(store: SharedDiskStore, root: Path) -> None:
    """Fill a store that has room for ten entries; the first is the oldest."""
    for n, one in enumerate(TEN):
        store.put(one, sized(100))
        age(path_of(root, one), 1000 - n)


@pytest.mark.parametrize("entries", [1, 40])
def test_ledger_that_is_one_entry_too_low_costs_one_entry_until_a_sweep(
    root: Path, entries: int
) -> None:
    """A replacement and an evictor may both release the entry that was replaced."""
    with opened(root, f"max_bytes={20 * BLOCK}") as store:
        for n in range(entries):
            store.put(key(str(n)), sized(100))
        release(folder_of(root), BLOCK)
        left = min(19, entries - 1)
        stats = store.stats()
        assert (stats.entries, stats.bytes) == (left, BLOCK * left)
        for n in range(40):
            assert store.put(key(f"new-{n}"), sized(100)) is True
            assert entries_bytes(root) <= 21 * BLOCK
        store.evict()
        store.sweep()

        assert store.stats().drops == 0
        assert store.stats().bytes == entries_bytes(root) <= 20 * BLOCK
        assert store.stats().entries == len(files(root, "entries"))


@pytest.mark.changes_files
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_entries_that_were_deleted_by_hand_make_room_without_a_sweep(
    root: Path, share: float
) -> None:
    with opened(root, f"max_bytes={20 * BLOCK}") as store:
        for n in range(20):
            store.put(key(str(n)), sized(100))
        entries = files(root, "entries")
        for path in entries[: int(share * len(entries))]:
            path.unlink()
        stored = []
        for n in range(60):  # the first ones find no entry to evict
            with suppress(StoreUnavailable):
                stored.append(store.put(key(f"new-{n}"), sized(100)))
            time.sleep(0.02)

        assert len(stored) >= 30
        assert 17 <= len(files(root, "entries")) <= 20
        assert store.stats().bytes == entries_bytes(root)


@pytest.mark.changes_files
def test_sweep_corrects_the_ledger_beside_a_writer(root: Path) -> None:
    with opened(root, f"max_bytes={1000 * BLOCK}") as store, opened(root) as other:
        for n in range(100):
            store.put(key(str(n)), sized(100))
        for path in files(root, "entries")[:90]:
            path.unlink()
        over = threading.Event()

        def write() -> None:
            n = 0
            while not over.is_set():
                n += 1
                store.put(key(f"new-{n}"), sized(100))
                time.sleep(0.01)

        writer = threading.Thread(target=write)
        writer.start()
        other.sweep(0)
        over.set()
        writer.join()

        # What was written during the count stays counted twice until the next sweep.
        assert (store.stats().entries or 0) - len(files(root, "entries")) < 45


@pytest.mark.fault(94)
def test_writers_evict_beside_a_process_that_was_stopped_within_an_eviction(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_within() -> None:
        monkeypatch.setattr(
            housekeeping, "try_lock", lambda _: os.kill(os.getpid(), signal.SIGSTOP)
        )
        with opened(root) as other:
            other.put(key("stopped"), sized(100))

    with opened(root, f"max_bytes={10 * BLOCK}") as store:
        fill_ten(store, root)
        with stopped(stop_within):
            for n in range(3):
                assert store.put(key(f"next {n}"), sized(100)) is True
            assert store.stats().drops == 0
            assert (store.stats().bytes or 0) <= 10 * BLOCK


def test_concurrent_writers_keep_the_quota_and_young_entries(root: Path) -> None:
    with opened(root, f"max_bytes={64 * BLOCK}") as store:
        for n in range(64):
            store.put(key(str(n)), sized(100))
            age(path_of(root, key(str(n))), 1000)
        writers = [threading.Thread(target=put_many, args=(root, n, 4)) for n in range(8)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()

        assert store.stats().bytes == entries_bytes(root) <= 64 * BLOCK
        assert store.stats().entries == len(list(store.ls())) > 48
        young = [row for row in store.ls() if row.info and "of" in row.info.key.identifier]
        # Half of all entries stay old: one in 256 samples of eight contains none of them.
        assert len(young) >= 32 - 3


def put_many(root: Path, writer: int, number: int) -> None:
    with opened(root) as store:
        for n in range(number):
            assert store.put(key(f"{n} of {writer}"), sized(100)) is True


def test_store_is_not_full_if_another_process_removed_the_selected_entries(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the store would be taken for full of unevictable entries for a second."""
    with opened(root, f"max_bytes={10 * BLOCK}") as store, opened(root) as other:
        fill_ten(store, root)

        def replace_oldest(_: Sequence[EvictionCandidate]) -> None:
            other.delete(TEN[:1])
            other.put(key("x"), sized(100))

        choosing(monkeypatch, replace_oldest)

        assert store.put(key("next"), sized(100)) is True
        assert store.stats().drops == 0
        assert store.stats().bytes == entries_bytes(root) <= 10 * BLOCK


def test_store_is_not_full_if_the_selected_entries_are_read_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(root, f"max_bytes={10 * BLOCK}") as store, opened(root) as reader:
        fill_ten(store, root)

        def use_all(going: Sequence[EvictionCandidate]) -> None:
            for kept in going:
                [used] = [one for one in TEN if one.digest == kept.digest]
                assert reader.get(used) is not None

        choosing(monkeypatch, use_all)

        assert store.put(key("next"), sized(100)) is True
        assert [one is None for one in store.lookup(TEN[:5])] == [False, False, True, True, False]


def test_store_is_full_of_entries_that_this_process_may_not_remove(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries are in folders of another user; the writer does not wait for other evictors."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with opened(root, f"max_bytes={10 * BLOCK}") as store:
        fill_ten(store, root)
        denied = Mock(side_effect=PermissionError(errno.EACCES, "denied"))
        monkeypatch.setattr(ledger, "remove_locked", denied)
        with pytest.raises(StoreUnavailable, match="none of its entries can be evicted"):
            store.put(key("next"), sized(100))

        assert pauses == []
        assert store.stats().bytes == entries_bytes(root)


def test_put_on_a_full_disk_evicts_the_needed_bytes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer evicts for its entry only, and not for a sixteenth of the quota in addition."""
    with opened(root) as store:
        for n in range(20):
            store.put(key(str(n)), sized(100))
        write, failures = os.pwritev, iter([OSError(errno.ENOSPC, "full")])

        def pwritev(*args: Any) -> int:
            for error in failures:
                raise error
            return write(*args)

        monkeypatch.setattr(os, "pwritev", pwritev)

        assert store.put(key("next"), sized(100)) is True
        assert store.stats().evictions == 1
        assert store.stats().entries == 20
