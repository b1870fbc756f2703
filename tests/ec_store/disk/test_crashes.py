"""Processes that are killed while they write to a full store, and what they leave."""

import fcntl
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ec_store import StoreUnavailable
from ec_store.disk import store as disk_store
from ec_store.disk.entry_files import write_entry
from ec_store.disk.eviction_policy import taken_bytes
from ec_store.disk.store import SharedDiskStore
from ec_store.disk.tree import STAGING_S
from ec_store.testing.stores import key, sized
from tests.ec_store.disk.on_disk import age, entries_bytes, files, later, opened, path_of

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
def test_writer_that_dies_before_it_publishes_leaves_nothing(root: Path) -> None:
    def put() -> None:
        def dying(*args: object) -> None:
            write_entry(*args)  # type: ignore[arg-type]
            die()

        vars(disk_store)["write_entry"] = dying
        opened(root).put(key("half"), sized(50_000))

    with opened(root) as store:
        store.put(key(), sized(1000))
        killed(put)

        assert files(root, "entries") == [path_of(root, key())]
        assert store.stats().bytes == entries_bytes(root)


@pytest.mark.fault(23)
def test_sweep_charges_what_a_killed_writer_had_not_charged_yet(root: Path) -> None:
    def put() -> None:
        vars(os)["pwrite"] = lambda *_: die()
        opened(root).put(key("half"), sized(50_000))

    with opened(root) as store:
        for n in range(39):  # more than an eviction samples
            store.put(key(str(n)), sized(1000))
        killed(put)
        assert store.stats().entries == 39
        store.sweep()

        assert store.stats().bytes == entries_bytes(root)
        assert store.stats().entries == 40


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
    for module, name in [*((os, name) for name in CALLS), (fcntl, "flock")]:
        real = getattr(module, name)

        def call(*args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                die()
            return real(*args, **kwargs)

        setattr(module, name, call)


@pytest.mark.fault(23)
def test_name_that_a_killed_writer_gave_a_replacement_is_removed(root: Path) -> None:
    def replace() -> None:
        with opened(root) as other:
            vars(os)["rename"] = lambda *_, **__: die()
            other.put(key(), sized(50_000), replace=True)

    with opened(root) as store:
        store.put(key(), sized(1000))
        killed(replace)
        assert len(leftovers(root)) == 1
        with later(STAGING_S - 10):
            store.sweep()
        assert len(leftovers(root)) == 1  # its writer may be about to rename it
        with later(STAGING_S + 1):
            store.sweep()

        assert files(root, "entries") == [path_of(root, key())]
        assert store.stats().bytes == entries_bytes(root)


@pytest.mark.full
@pytest.mark.fault(23)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_process_that_dies_before_any_call_leaves_no_wrong_byte_and_no_charge(
    root: Path, operation: str
) -> None:
    """The store is nearly full, so that a put evicts; two entries have expired."""
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
            with later(STAGING_S + 1):
                store.sweep()
            assert not leftovers(root)
            assert store.stats().bytes == entries_bytes(root)
            assert store.stats().corrupt == 0
        shutil.rmtree(root)
        number += 1
    assert number > 10
