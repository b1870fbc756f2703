"""Processes that are killed while they write to a full store, and what they leave."""

import fcntl
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ec_store import StoreUnavailable
from ec_store.disk import evictor, ledger, mounts, tree
from ec_store.disk.entry_files import EntryFiles
from ec_store.disk.files import Folder
from ec_store.disk.housekeeping import Housekeeping
from ec_store.disk.ledger import Ledger
from ec_store.disk.lock import FileLock
from ec_store.disk.tree import Tree, taken_bytes
from tests.ec_store.contract import assert_same, key, sized
from tests.ec_store.disk import on_disk
from tests.ec_store.disk.on_disk import age, entries_bytes, files, path_of, take_lock

opened = partial(on_disk.opened, young_s=float("-inf"))

KILLS = 60
QUOTA = 8 * 2**20
QUERY = f"max_bytes={QUOTA}"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], None], after_s: float | None = None) -> None:
    """Run `work` in a child that kills itself, or is killed `after_s` seconds after its start."""
    began, begins = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(begins, b"x")
            work()
        finally:
            os._exit(1)
    os.read(began, 1)
    os.close(began)
    os.close(begins)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def leftovers(root: Path) -> list[Path]:
    return [path for path in files(root, "entries") if path.suffix == ".tmp"]


def put_many(root: Path, name: int) -> None:
    chance = random.Random(name)  # noqa: S311
    with opened(root, QUERY) as store:
        for n in range(10**6):
            try:
                store.put(key(f"{name}/{n}"), sized(2 * chance.randrange(20_000)))
            except StoreUnavailable:
                continue


def put_and_die(root: Path, length: int, query: str = QUERY, name: str = "half") -> None:
    """Die after the payload of an entry was written."""
    store_entry = EntryFiles.store

    def dying(*args: object) -> None:
        store_entry(*args)  # type: ignore[arg-type]
        die()

    EntryFiles.store = dying  # type: ignore[method-assign, assignment]
    opened(root, query).put(key(name), sized(length))


def die_at_removal() -> None:
    """Die before a staging file of an entry is removed."""
    remove = Folder.remove

    def dying(folder: Folder, name: str) -> bool:
        if name.startswith(f".{key().digest}"):
            die()
        return remove(folder, name)

    Folder.remove = dying  # type: ignore[method-assign, assignment]


@pytest.mark.fault(23)
@pytest.mark.changes_files
def test_store_stays_readable_and_writable_while_its_writers_are_killed(root: Path) -> None:
    with opened(root, QUERY) as store:
        while not store.stats().evictions:
            store.put(key(f"first/{store.stats().puts}"), sized(20_000))
    chance = random.Random(1)  # noqa: S311
    for n in range(KILLS):
        killed(lambda n=n: put_many(root, n), chance.uniform(0.005, 0.02))  # type: ignore[misc]
    with opened(root, QUERY) as store:
        for n in range(100):
            assert store.put(key(f"last/{n}"), sized(20_000)) is True
        readable = sum(taken_bytes(row.size_bytes) for row in store.ls())

    assert 0.9 * QUOTA <= readable <= 1.02 * QUOTA


@pytest.mark.fault(23)
def test_leftovers_of_dead_writers_are_removed_before_any_entry(root: Path) -> None:
    with opened(root, "max_bytes=200KiB") as store:
        for n in range(9):
            store.put(key(str(n)), sized(10_000))
        killed(lambda: put_and_die(root, 80_000))
        assert len(leftovers(root)) == 1
        store.put(key("more"), sized(70_000))

        assert not leftovers(root)
        assert store.stats().evictions == 0
        assert store.stats().bytes == entries_bytes(root)


@pytest.mark.fault(23)
def test_entries_that_a_killed_evictor_had_renamed_are_removed_at_once(root: Path) -> None:
    def evict() -> None:
        die_at_removal()
        opened(root, "ttl=1h").evict()

    with opened(root, "ttl=1h") as store:
        store.put(key(), sized(1000))
        age(path_of(root, key()), 7200)
        killed(evict)
        assert len(leftovers(root)) == 1
        store.evict()

        assert not leftovers(root)
        assert store.stats().bytes == 0


@pytest.mark.fault(23)
def test_entry_that_a_killed_writer_had_not_charged_yet_is_not_released(root: Path) -> None:
    def put() -> None:
        Ledger.charge = lambda *_: die()  # type: ignore[method-assign]
        opened(root).put(key("half"), sized(50_000))

    with opened(root) as store:
        for n in range(40):  # more than an eviction samples
            store.put(key(str(n)), sized(1000))
        killed(put)
        assert len(leftovers(root)) == 1
        while leftovers(root):
            store.evict()

        assert store.stats().bytes == entries_bytes(root)
        assert store.stats().entries == 40


@pytest.mark.fault(23)
def test_name_that_a_killed_writer_left_of_a_published_entry_releases_nothing(root: Path) -> None:
    def put() -> None:
        die_at_removal()
        opened(root).put(key(), sized(1000))

    killed(put)
    with opened(root) as store:
        assert len(leftovers(root)) == 1
        store.evict()

        assert not leftovers(root)
        assert_same(sized(1000), store.get(key()))
        assert store.stats().bytes == entries_bytes(root)


def test_staging_file_of_a_living_writer_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_entry = EntryFiles.store
    seen: list[int] = []

    def evicting(*args: object) -> None:
        store_entry(*args)  # type: ignore[arg-type]
        with opened(root) as other:
            other.sweep()
            seen.append(len(leftovers(root)))

    monkeypatch.setattr(EntryFiles, "store", evicting)
    with opened(root) as store:
        assert store.put(key(), sized(1000)) is True
        assert_same(sized(1000), store.get(key()))
    assert seen == [1]


def test_writer_on_a_file_server_locks_nothing_and_its_leftovers_stay_for_an_hour(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    table = tmp_path / "mountinfo"
    table.write_text(f"28 1 {os.major(device)}:{os.minor(device)} / / rw - nfs4 x rw\n")
    monkeypatch.setattr(mounts, "TABLE", table)
    monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("a file was locked"))
    killed(lambda: put_and_die(root, 1000))
    with opened(root, QUERY) as store:
        store.sweep()
        assert len(leftovers(root)) == 1

        # Also if the file server itself, on which the files are local, looks.
        monkeypatch.undo()
    with opened(root, QUERY) as store:
        store.sweep()
        assert len(leftovers(root)) == 1
        monkeypatch.setattr(evictor, "STAGING_S", -1)
        store.sweep()
        assert not leftovers(root)
        assert store.stats().bytes == 0


def test_child_of_a_fork_does_not_keep_its_parent_alive(root: Path) -> None:
    forked, forks = os.pipe()
    go, goes = os.pipe()

    def fork_and_die() -> None:
        with opened(root) as store:
            store.put(key(), sized(10))
            if os.fork() == 0:
                os.close(goes)
                os.write(forks, b"x")
                os.read(go, 1)
                os._exit(0)
            os.read(forked, 1)
            EntryFiles.store = lambda *_: die()  # type: ignore[method-assign]
            store.put(key("half"), sized(1000))

    killed(fork_and_die)
    try:
        with opened(root) as store:
            store.evict()
            assert not leftovers(root)
    finally:
        for end in (go, goes, forked, forks):
            os.close(end)


@pytest.mark.fault(23)
def test_leftovers_of_a_moment_ago_are_removed_later(root: Path) -> None:
    killed(lambda: put_and_die(root, 1000))
    with on_disk.opened(root, young_s=3600) as store:
        store.evict()
        assert len(leftovers(root)) == 1
    with on_disk.opened(root, young_s=0.01) as store:
        time.sleep(0.1)
        store.evict()
        assert not leftovers(root)
        assert store.stats().bytes == 0


def test_eviction_tests_no_locks_of_processes_that_are_writing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store with the time of the default, and one that counts no staging file as young."""
    store_entry = EntryFiles.store
    tested: list[str] = []

    def is_unlocked(_: Folder, name: str) -> bool:
        tested.append(name)
        return False

    def evicting(*args: object) -> None:
        store_entry(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(EntryFiles, "store", store_entry)
        for evict in (on_disk.opened, opened):
            with evict(root) as other:
                assert not tested
                other.evict()
        assert len(tested) == 1

    monkeypatch.setattr(EntryFiles, "store", evicting)
    monkeypatch.setattr(ledger, "is_unlocked", is_unlocked)
    with on_disk.opened(root) as store:
        assert store.put(key(), sized(1000)) is True
    assert tested


@pytest.mark.parametrize(("entries", "size", "left"), [(90, 20_000, 100), (200, 100, 1_500_000)])
def test_store_is_counted_for_the_bytes_of_a_leftover_as_for_its_number(
    root: Path, monkeypatch: pytest.MonkeyPatch, entries: int, size: int, left: int
) -> None:
    """A leftover makes a count of 100 entries certain; one of the size of 300, one of 30,000."""
    monkeypatch.setattr(random, "random", lambda: 1 - 2**-53)
    with opened(root) as store:
        for n in range(entries):
            store.put(key(str(n)), sized(size))
        killed(lambda: put_and_die(root, left))
        usage = store._opening.tree().usage  # noqa: SLF001
        Ledger().charge(usage, taken_bytes(size))
        while leftovers(root):
            store.evict()

        assert store.stats().entries == entries


@pytest.fixture
def slow_count(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Return a list of hooks that run in each folder that is read, 20 seconds after the last."""
    scan, hooks = vars(tree)["_scan"], list[Callable[[], object]]()
    lock = root / "evicting.link"

    def scanned(*args: Any) -> Any:
        if lock.is_symlink():
            age(lock, 20)
            for hook in hooks:
                hook()
        return scan(*args)

    monkeypatch.setitem(vars(tree), "_scan", scanned)
    monkeypatch.setattr(evictor, "RENEW_S", -1)
    return hooks


@pytest.mark.fault(94)
def test_lock_is_renewed_while_an_eviction_counts(
    root: Path, slow_count: list[Callable[[], object]]
) -> None:
    """Only a part of the entries is a sample: the count reads the others."""
    lock, holders, other = root / "evicting.link", set[Path](), on_disk.opened(root)
    with opened(root) as store:
        for n in range(60):
            store.put(key(str(n)), sized(1000))
        killed(lambda: put_and_die(root, 1000))

        def evict_too() -> None:
            holders.add(lock.readlink())
            assert (
                other._keeper._evictor._lock.acquire(  # noqa: SLF001
                    other._opening.tree().root,  # noqa: SLF001
                    time.time,
                )
                is None
            )

        slow_count.append(evict_too)
        while leftovers(root):
            holders.clear()
            store.evict()

        assert len(holders) == 1
        assert store.stats().bytes == entries_bytes(root)


@pytest.mark.fault(94)
@pytest.mark.changes_files
def test_eviction_that_loses_its_lock_during_a_count_removes_and_corrects_nothing(
    root: Path, slow_count: list[Callable[[], object]]
) -> None:
    with opened(root) as store:
        for n in range(6):
            store.put(key(str(n)), sized(1000))
            age(path_of(root, key(str(n))), 8 * 86400)
        Ledger().charge(store._opening.tree().usage, 5 * 4096, 5)  # noqa: SLF001
        read: list[bool] = []

        def lose() -> None:
            read.append(True)
            if len(read) == 3:
                take_lock(root / "evicting.link")

        slow_count.append(lose)
        store.evict()

        assert len(read) == 3
        assert store.stats().evictions == 0
        assert store.stats().entries == 11


@pytest.mark.fault(94)
@pytest.mark.parametrize("clean", [Housekeeping.evict, partial(Housekeeping.sweep, every_s=0)])
def test_count_that_ends_at_an_error_of_the_lock_corrects_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, clean: Callable[[Housekeeping, Tree], int]
) -> None:
    """A file server may fail one read of the lock, and answer the next one."""
    monkeypatch.setattr(evictor, "RENEW_S", -1)
    still_held, asked = FileLock.still_held, list[object]()

    def fails_once(*args: Any) -> bool:
        asked.append(args)
        return len(asked) != 3 and still_held(*args)

    with opened(root) as store:
        for n in range(6):
            store.put(key(str(n)), sized(1000))
        monkeypatch.setattr(FileLock, "still_held", fails_once)
        clean(store._keeper, store._opening.tree())  # noqa: SLF001

        assert len(asked) >= 3
        assert store.stats().entries == 6
