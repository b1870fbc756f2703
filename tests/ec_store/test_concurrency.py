"""Calls on daemon threads, which do not delay the end of the process."""

import asyncio
import threading
import time
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any

import pytest

from ec_store import Entry, EntryKey, StoreUnavailable, open_store
from ec_store.aio import on_thread
from ec_store.concurrency import DaemonPool
from ec_store.disk import entry_files
from tests.ec_store.conftest import NoThreads


def test_pool_runs_calls_and_reports_their_results() -> None:
    pool = DaemonPool(3, "test")
    done = [pool.submit(lambda number=number: 10 // number) for number in (1, 2, 0)]  # type: ignore[misc]

    assert [done[0].result(60), done[1].result(60)] == [10, 5]
    with pytest.raises(ZeroDivisionError):
        done[2].result(60)
    pool.close()


def test_a_daemon_pool_runs_its_number_of_calls_at_once() -> None:
    pool = DaemonPool(3, "test")
    go, running = threading.Event(), threading.Semaphore(0)
    most = []

    def call() -> str:
        running.release()
        go.wait(60)
        most.append(threading.active_count())
        return threading.current_thread().name

    done = [pool.submit(call) for _ in range(9)]
    assert all(running.acquire(timeout=60) for _ in range(3))
    assert not running.acquire(timeout=0.1)
    go.set()
    wait(done, 5)

    assert {future.result() for future in done} <= {"test-1", "test-2", "test-3"}
    pool.close()


def test_one_thread_serves_calls_that_come_one_after_the_other() -> None:
    pool = DaemonPool(3, "test")
    names = set()
    for _ in range(20):
        names.add(pool.submit(lambda: threading.current_thread().name).result(60))
        time.sleep(0.01)

    assert names == {"test-1"}
    pool.close()


def test_closing_the_pool_cancels_waiting_calls() -> None:
    pool = DaemonPool(1, "test")
    go = threading.Event()
    first, second = pool.submit(lambda: go.wait(60)), pool.submit(lambda: 1)
    pool.close()
    go.set()

    assert first.result(60)
    with pytest.raises(CancelledError):
        second.result(60)
    with pytest.raises(CancelledError):
        pool.submit(lambda: 1).result(60)


async def test_pool_reports_results_to_an_event_loop() -> None:
    pool = DaemonPool(1, "test")

    assert await on_thread(pool, lambda: 10) == 10
    with pytest.raises(ZeroDivisionError):
        await on_thread(pool, lambda: 1 // 0)
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await on_thread(pool, lambda: 1)


async def test_a_call_cancelled_by_the_loop_is_skipped_or_completes_unobserved() -> None:
    pool = DaemonPool(1, "test")
    begun, go, made = threading.Event(), threading.Event(), list[int]()

    def call() -> None:
        begun.set()
        go.wait(60)
        made.append(1)

    first = on_thread(pool, call)
    assert await asyncio.to_thread(begun.wait, 60)
    second = on_thread(pool, lambda: made.append(2))
    first.cancel()
    second.cancel()
    go.set()
    await on_thread(pool, lambda: made.append(3))

    assert made == [1, 3]


async def test_closing_the_pool_cancels_futures_of_an_event_loop() -> None:
    pool = DaemonPool(1, "test")
    begun, go = threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return go.wait(60)

    first, second = on_thread(pool, call), on_thread(pool, lambda: True)
    assert await asyncio.to_thread(begun.wait, 60)
    pool.close()
    go.set()

    assert await first
    with pytest.raises(asyncio.CancelledError):
        await second


@pytest.mark.fault(87)
async def test_calls_are_dropped_while_no_thread_can_be_started(
    no_threads: NoThreads, caplog: pytest.LogCaptureFixture
) -> None:
    pool = DaemonPool(2, "test")
    with no_threads():
        with pytest.raises(CancelledError):
            pool.submit(lambda: 1).result(60)
        with pytest.raises(StoreUnavailable, match="thread"):
            await on_thread(pool, lambda: 1)
    assert pool.submit(lambda: 2).result(60) == 2
    pool.close()

    [record] = caplog.records
    assert "pids.max" in record.getMessage()


@pytest.mark.fault(87)
def test_a_running_thread_takes_the_calls_of_one_that_cannot_be_started(
    no_threads: NoThreads,
) -> None:
    pool = DaemonPool(2, "test")
    go = threading.Event()
    first = pool.submit(lambda: go.wait(60))
    with no_threads():
        second = pool.submit(lambda: 2)
        go.set()
        assert second.result(60) == 2
    assert first.result(60)
    pool.close()


@pytest.mark.fault(25)
def test_a_store_is_closed_while_a_read_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = threading.Event(), threading.Event()
    went_on: list[bool] = []
    read = entry_files._read  # noqa: SLF001

    def hang(*args: Any) -> None:
        started.set()
        went_on.append(go.wait(60))
        read(*args)

    monkeypatch.setattr(entry_files, "_read", hang)
    size = 2 * entry_files.LARGE_BYTES
    key = EntryKey("ns", "k")
    entry = Entry(memoryview(bytes(size)), "F32", (1, size // 4), "image")
    store, reader = open_store(f"file://{tmp_path}/store"), DaemonPool(1, "read")
    store.put(key, entry)
    got = reader.submit(lambda: store.get(key))
    assert started.wait(60)
    time.sleep(0.1)
    store.close()
    assert went_on == []
    go.set()

    assert got.result(60) == entry
    reader.close()
