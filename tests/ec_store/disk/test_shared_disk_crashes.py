"""Processes that are killed while they write to a full store, and what they leave."""

import fcntl
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ec_store import StoreUnavailable
from ec_store.disk import evictor
from ec_store.disk import store as disk_store
from ec_store.disk.entry_files import write_entry
from ec_store.disk.eviction_policy import taken_bytes
from ec_store.disk.files import Folder
from ec_store.disk.ledger import Ledger
from ec_store.disk.store import SharedDiskStore
from tests.ec_store.contract import assert_same, key, sized
from tests.ec_store.disk import on_disk
from tests.ec_store.disk.on_disk import age, entries_bytes, files, path_of

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

    def dying(*args: object) -> None:
        write_entry(*args)  # type: ignore[arg-type]
        die()

    vars(disk_store)["write_entry"] = dying
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
def test_sweep_charges_what_a_killed_writer_had_not_charged_yet(root: Path) -> None:
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
        assert store.stats().entries == 39
        store.sweep()

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
    seen: list[int] = []

    def evicting(*args: object) -> None:
        write_entry(*args)  # type: ignore[arg-type]
        with opened(root) as other:
            other.sweep()
            seen.append(len(leftovers(root)))

    monkeypatch.setattr(disk_store, "write_entry", evicting)
    with opened(root) as store:
        assert store.put(key(), sized(1000)) is True
        assert_same(sized(1000), store.get(key()))
    assert seen == [1]


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
            vars(disk_store)["write_entry"] = lambda *_: die()
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
    tested: list[int] = []

    def is_locked(fd: int) -> bool:
        tested.append(fd)
        return True

    def evicting(*args: object) -> None:
        write_entry(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(disk_store, "write_entry", write_entry)
        for evict in (on_disk.opened, opened):
            with evict(root) as other:
                assert not tested
                other.evict()
        assert len(tested) == 1

    monkeypatch.setattr(disk_store, "write_entry", evicting)
    monkeypatch.setattr(evictor, "is_locked", is_locked)
    with on_disk.opened(root) as store:
        assert store.put(key(), sized(1000)) is True
    assert tested


def test_entry_that_another_evictor_has_set_aside_is_no_leftover(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry was leased meanwhile, so the evictor restores its name."""
    publish = Folder.publish
    swept: list[str] = []

    def swept_meanwhile(folder: Folder, staging: str, name: str) -> bool:
        monkeypatch.setattr(Folder, "publish", publish)
        with opened(root) as other:
            other.sweep()
        swept.append(name)
        return publish(folder, staging, name)

    rename = Folder.rename

    def used(folder: Folder, name: str, *more: Any) -> None:
        if name == key().digest:
            age(path_of(root, key()), -7200)
        rename(folder, name, *more)

    with opened(root, "ttl=1h") as store:
        store.put(key(), sized(1000))
        age(path_of(root, key()), 7200)
        monkeypatch.setattr(Folder, "publish", swept_meanwhile)
        monkeypatch.setattr(Folder, "rename", used)
        store.evict()

        assert swept == [key().digest]
        assert_same(sized(1000), store.get(key()))


CALLS = (
    *("open", "close", "pread", "pwrite", "pwritev", "rename", "link", "unlink", "mkdir", "rmdir"),
    *("stat", "utime", "fchmod", "scandir"),
)
OPERATIONS: dict[str, Callable[[SharedDiskStore], object]] = {
    "put": lambda store: store.put(key("new"), sized(20_000, 1)),
    "put, large": lambda store: store.put(key("new"), sized(2**20 + 2, 1)),
    "replace": lambda store: store.put(key("0"), sized(9000, 0), replace=True),
    "delete": lambda store: store.delete([key("0")]),
    "evict": lambda store: store.evict(),
    "sweep": lambda store: store.sweep(),
}


def die_before_call(number: int) -> None:
    """Let this process die before it makes call `number` of those that change or read files."""
    left = [number]
    for module, name in [*((os, name) for name in CALLS), (fcntl, "fcntl")]:
        real = getattr(module, name)

        def call(*args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                die()
            return real(*args, **kwargs)

        setattr(module, name, call)


@pytest.mark.full
@pytest.mark.fault(23)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_process_that_dies_before_any_call_leaves_no_wrong_byte_and_no_charge(
    root: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """The store is nearly full, so that a put evicts; two entries have expired."""
    monkeypatch.setattr(evictor, "RELEASE_S", 0)
    keys = [key(str(n)) for n in range(12)]
    died, number = True, 0
    while died:
        with opened(
            root, f"max_bytes={24 * 4096 if operation != 'put, large' else 2**21}"
        ) as store:
            for n, each in enumerate(keys):
                store.put(each, sized(7000, n))
                age(path_of(root, each), 8 * 86400 if n < 2 else 100 - n)
        child = os.fork()
        if child == 0:
            with opened(root) as store:
                die_before_call(number)
                OPERATIONS[operation](store)
                os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        with opened(root) as store:
            for n, each in enumerate(keys):
                found = store.get(each)
                assert found is None or found.data in {
                    sized(length, n).data.tobytes() for length in (7000, 9000)
                }
            assert store.put(key("after"), sized(10)) is True
            store.sweep()
            assert not leftovers(root)
            assert store.stats().bytes == entries_bytes(root)
            assert store.stats().corrupt == 0
        shutil.rmtree(root)
        number += 1
    assert number > 10
