"""Many processes on one shared directory; some are killed at arbitrary instructions."""

import multiprocessing
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import pytest

from ec_store import StoreUnavailable
from ec_store.disk.eviction_policy import taken_bytes
from ec_store.disk.store import SharedDiskStore
from ec_store.testing.stores import key, sized
from tests.ec_store.disk import on_disk

pytestmark = pytest.mark.full

KILLS = 40
ROUNDS_PER_KILL = 100
HANGS_S = 300.0
"""Seconds without a round after which a process counts as hung; a slow machine needs less."""
WRITERS = READERS = 8
KEYS = 150
MAX_BYTES = 2 * 2**20
LARGEST = 64 * 1024
SPAWN = multiprocessing.get_context("fork")


@pytest.fixture
def root() -> Iterator[Path]:
    parent = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield parent / "store"
    shutil.rmtree(parent)


def opened(root: Path, max_bytes: int = MAX_BYTES) -> SharedDiskStore:
    return SharedDiskStore.from_url(f"{root.as_uri()}?max_bytes={max_bytes}")


def length(n: int) -> int:
    return 1000 + n * 400 % (LARGEST - 2000)


def write(root: Path, seed: int, rounds: "Synchronized[int]") -> None:
    chance = random.Random(seed)  # noqa: S311
    with opened(root) as store:
        while True:
            n = chance.randrange(KEYS)
            try:
                store.put(key(str(n)), sized(length(n), n))
                if chance.random() < 0.1:
                    store.delete([key(str(chance.randrange(KEYS)))])
                if chance.random() < 0.1:
                    store.lease([key(str(chance.randrange(KEYS)))], 0.1)
            except StoreUnavailable as error:
                if "full" not in str(error):
                    raise
            with rounds.get_lock():
                rounds.value += 1


def read(root: Path, seed: int, rounds: "Synchronized[int]", torn: "Synchronized[int]") -> None:
    chance = random.Random(seed)  # noqa: S311
    with opened(root) as store:
        while True:
            n = chance.randrange(KEYS)
            found = store.get(key(str(n)))
            wrong = found is not None and found.data != sized(length(n), n).data
            wrong |= store.stats().corrupt > 0
            store.lookup([key(str(chance.randrange(KEYS))) for _ in range(4)])
            if wrong:
                with torn.get_lock():
                    torn.value += 1
            with rounds.get_lock():
                rounds.value += 1


def entries_bytes(root: Path) -> int:
    """Return the disk space of the entries that a reader could open at the moment."""
    size = 0
    for folder, _, names in os.walk(root / "entries"):
        for name in names:
            if re.fullmatch("[0-9a-f]{64}", name):
                try:
                    status = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118
                    size += taken_bytes(status.st_size)
                except FileNotFoundError:
                    continue
    return size


@pytest.mark.fault(22)
@pytest.mark.fault(23)
def test_writers_and_readers_that_are_killed_tear_nothing_and_keep_the_quota(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [SPAWN.Value("q", 0) for _ in range(WRITERS + READERS)]
    torn = SPAWN.Value("q", 0)

    def start(n: int) -> BaseProcess:
        # A new counter for each process: a killed one may hold its counter's lock.
        rounds.append(SPAWN.Value("q", 0))
        seed = len(rounds)
        process = (
            SPAWN.Process(target=write, args=(root, seed, rounds[-1]))
            if n < WRITERS
            else SPAWN.Process(target=read, args=(root, seed, rounds[-1], torn))
        )
        process.start()
        return process

    def done() -> int:
        return sum(each.get_obj().value for each in rounds)

    processes = [start(n) for n in range(WRITERS + READERS)]
    most = 0
    try:
        for kill in range(KILLS):
            due, deadline = done() + ROUNDS_PER_KILL, time.monotonic() + HANGS_S
            while done() < due:
                assert time.monotonic() < deadline, "the processes hang"
                most = max(most, entries_bytes(root))
                time.sleep(0.01)
            n = kill * 7 % len(processes)
            processes[n].kill()
            processes[n].join()
            assert processes[n].exitcode == -signal.SIGKILL
            processes[n] = start(n)
    finally:
        for process in processes:
            process.kill()
            process.join()

    assert torn.get_obj().value == 0
    assert MAX_BYTES / 2 < most <= MAX_BYTES + WRITERS * (LARGEST + 5000)
    with on_disk.opened(root, f"max_bytes={MAX_BYTES}") as store:
        store.sweep()
        assert not list((root / "entries").rglob("*.tmp"))
        assert [row for row in store.verify() if row.problem] == []
        assert store.stats().bytes == entries_bytes(root) <= MAX_BYTES
        assert store.stats().corrupt == 0


def fill(root: Path, seed: int, evicted: "Synchronized[int]", put: "Synchronized[int]") -> None:
    with opened(root) as store:
        for n in range(200):
            try:
                store.put(key(f"{seed}/{n}"), sized(20_000, seed))
            except StoreUnavailable:
                continue
        stats = store.stats()
    with evicted.get_lock():
        evicted.value += stats.evictions
    with put.get_lock():
        put.value += stats.puts


def test_evictors_in_many_processes_count_each_entry_once(root: Path) -> None:
    evicted, put = SPAWN.Value("q", 0), SPAWN.Value("q", 0)
    processes = [SPAWN.Process(target=fill, args=(root, n, evicted, put)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    with opened(root) as store:
        left = len(list(store.ls()))

        assert [process.exitcode for process in processes] == [0] * 4
        assert put.value > 700
        assert put.value - evicted.value == left
        # A sweep corrects a count only by what is certain, since others write at the same time.
        assert left <= (store.stats().entries or 0) <= left + len(processes)
        left -= store.sweep()
        assert len(list(store.ls())) == left
        assert store.stats().entries == left
        assert store.stats().bytes == entries_bytes(root) <= MAX_BYTES
