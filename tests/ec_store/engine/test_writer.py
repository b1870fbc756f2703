"""Writer: the caller never waits."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ec_store import Entry, EntryInfo, EntryKey, Store, StoreUnavailable, open_store
from ec_store.concurrency import FAILURES, OPEN_S
from ec_store.counts import MAX_OBSERVATIONS, Counts
from ec_store.engine.writer import Writer
from tests.ec_store.conftest import NoThreads
from tests.ec_store.entries import entry
from tests.ec_store.waiting import until

NAMESPACE = "ns"
SIZE = entry().data.nbytes


class Paused:
    """Real store with calls that wait, or fail, until the test releases them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.go = threading.Event()
        self.failing: Exception | None = None
        self.calls = 0

    def _wait(self) -> None:
        self.calls += 1
        if self.failing:
            raise self.failing
        self.go.wait(60)

    def get(self, key: EntryKey) -> Entry | None:
        self._wait()
        return self.store.get(key)

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
        self._wait()
        return self.store.lease(keys, seconds)

    def put(self, key: EntryKey, value: Entry) -> bool:
        self._wait()
        return self.store.put(key, value)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"file://{tmp_path}/store") as opened:
        yield opened


@pytest.fixture
def paused(store: Store) -> Iterator[Paused]:
    made = Paused(store)
    yield made
    made.go.set()


def submit(writer: Writer, key: EntryKey, size: int, make: Callable[[], Entry | None]) -> bool:
    """Queue the write of an entry that `make` makes; None: it must not be stored."""
    store: Any = writer.store

    def write() -> bool | None:
        made = make()
        return None if made is None else bool(store.put(key, made))

    return writer.submit(key, size, write)


def test_writer_drops_an_unstorable_entry_and_continues(store: Store) -> None:
    outcomes: dict[str, bool] = {}
    writer = Writer(store, done=lambda key, stored: outcomes.update({key.identifier: stored}))
    for number in range(FAILURES + 1):
        assert submit(writer, EntryKey(NAMESPACE, f"refused-{number}"), SIZE, lambda: None)
    assert submit(writer, EntryKey(NAMESPACE, "k"), SIZE, entry)
    writer.close()

    assert outcomes == {**{f"refused-{n}": False for n in range(FAILURES + 1)}, "k": True}
    figures = writer.counts.take_counts()
    assert (figures["drops"], figures["saves"]) == (FAILURES + 1, 1)


def test_writer_counts_what_it_has_no_time_to_write(paused: Any) -> None:
    writer = Writer(paused)
    for name in ("first", "second"):
        assert submit(writer, EntryKey(NAMESPACE, name), SIZE, entry)
    until(lambda: paused.calls)
    writer.close(0.05)
    paused.go.set()
    until(lambda: not writer.waiting_bytes)

    assert (writer.counts["saves"], writer.counts["drops"]) == (1, 1)


def test_writer_writes_only_missing_entries(store: Store) -> None:
    writer = Writer(store)
    made = []

    def make() -> Entry:
        made.append(1)
        return entry()

    key = EntryKey(NAMESPACE, "k")
    assert submit(writer, key, SIZE, make)
    until(lambda: store.get(key) is not None)
    until(lambda: not writer.waiting_bytes)
    assert submit(writer, key, SIZE, make)
    writer.close()

    assert made == [1]
    assert (writer.counts["saves"], writer.counts["known"]) == (1, 1)


@pytest.mark.fault(87)
def test_a_writer_drops_entries_while_its_thread_cannot_be_started(
    store: Store, no_threads: NoThreads
) -> None:
    key = EntryKey(NAMESPACE, "k")
    with no_threads():
        writer = Writer(store)
        assert not submit(writer, key, SIZE, entry)
    assert submit(writer, key, SIZE, entry)
    writer.close()

    assert (writer.counts["drops"], writer.counts["saves"]) == (1, 1)


def test_a_full_queue_drops_and_counts_entries_without_blocking(paused: Paused) -> None:
    writer = Writer(paused, queue_bytes=2 * SIZE)
    taken = [submit(writer, EntryKey(NAMESPACE, str(n)), SIZE, entry) for n in range(6)]
    paused.go.set()
    writer.close()

    assert taken == [True, True, False, False, False, False]
    assert (writer.counts["drops"], writer.counts["saves"]) == (4, 2)


def test_an_entry_larger_than_the_queue_may_wait_by_itself(paused: Paused) -> None:
    writer = Writer(paused, queue_bytes=1)
    taken = [submit(writer, EntryKey(NAMESPACE, str(n)), SIZE, entry) for n in range(2)]
    paused.go.set()
    writer.close()

    assert taken == [True, False]


def test_writer_releases_a_tensor_after_its_write(store: Store) -> None:
    writer = Writer(store)

    class Tensor:
        def __call__(self) -> Entry:
            return entry()

    tensor = Tensor()
    gone = weakref.ref(tensor)
    submit(writer, EntryKey(NAMESPACE, "k"), SIZE, tensor)
    del tensor
    until(lambda: gone() is None)
    writer.close()


def test_writer_observes_the_time_of_each_write_also_of_one_that_fails(paused: Paused) -> None:
    clock = Clock()
    writer = Writer(paused, clock=clock)
    for failing, seconds in ((None, 2.0), (StoreUnavailable("away"), 0.0), (None, 3.0)):
        paused.failing, calls = failing, paused.calls
        submit(writer, EntryKey(NAMESPACE, str(seconds)), SIZE, entry)
        until(lambda calls=calls: paused.calls > calls)  # type: ignore[misc]
        clock.now += seconds
        paused.go.set()
        until(lambda: not writer.waiting_bytes)
        paused.go.clear()
    writer.close()

    assert writer.counts.take_observations() == {"save_seconds": [2.0, 0.0, 3.0]}


def test_writer_reports_no_write_of_stored_or_unstorable_entries(store: Store) -> None:
    writer = Writer(store)
    store.put(EntryKey(NAMESPACE, "k"), entry())
    submit(writer, EntryKey(NAMESPACE, "k"), SIZE, entry)
    submit(writer, EntryKey(NAMESPACE, "refused"), SIZE, lambda: None)
    writer.close()

    assert (writer.counts["known"], writer.counts["drops"]) == (1, 1)
    assert writer.counts.take_observations() == {}


@pytest.mark.fault(17)
@pytest.mark.parametrize("error", [StoreUnavailable("away"), RuntimeError("no memory")], ids=str)
def test_a_write_that_fails_is_counted_and_the_next_one_is_tried(
    paused: Paused, error: Exception
) -> None:
    paused.go.set()
    paused.failing = error
    told: list[tuple[str, bool]] = []
    writer = Writer(paused, done=lambda key, stored: told.append((key.identifier, stored)))
    submit(writer, EntryKey(NAMESPACE, "a"), SIZE, entry)
    until(lambda: writer.counts["drops"] == 1)
    paused.failing = None
    submit(writer, EntryKey(NAMESPACE, "b"), SIZE, entry)
    writer.close()

    assert paused.store.get(EntryKey(NAMESPACE, "b")) is not None
    assert told == [("a", False), ("b", True)]


@pytest.mark.fault(17)
def test_an_unwritable_store_is_skipped_for_a_while(paused: Paused) -> None:
    paused.go.set()
    paused.failing = StoreUnavailable("full")
    clock = Clock()
    writer = Writer(paused, clock=clock)
    for number in range(FAILURES):
        assert submit(writer, EntryKey(NAMESPACE, str(number)), SIZE, entry)
        until(lambda number=number: writer.counts["drops"] == number + 1)  # type: ignore[misc]
    calls = paused.calls
    paused.failing = None

    assert not submit(writer, EntryKey(NAMESPACE, "next"), SIZE, entry)
    assert paused.calls == calls
    clock.now += OPEN_S + 1
    assert submit(writer, EntryKey(NAMESPACE, "next"), SIZE, entry)
    writer.close()
    assert writer.counts["saves"] == 1


def test_an_entry_too_large_is_dropped_and_others_are_written(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/small?max_entry_bytes=4096") as small:
        writer = Writer(small)
        large = Entry(memoryview(bytes(8192)), "F32", (1, 2048), "image")
        for number in range(2 * FAILURES):
            submit(writer, EntryKey(NAMESPACE, str(number)), SIZE, lambda: large)
        until(lambda: writer.counts["drops"] == 2 * FAILURES)
        assert submit(writer, EntryKey(NAMESPACE, "k"), SIZE, entry)
        writer.close()

        assert writer.counts["saves"] == 1


def test_counts_of_many_threads_are_not_lost() -> None:
    counts = Counts()
    taken: list[float] = []

    def add() -> None:
        for _ in range(5000):
            counts.add(hits=1, seconds=0.5)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken.append(counts.take_counts().get("hits", 0))
    taken.append(counts.take_counts().get("hits", 0))

    assert sum(taken) == 20000


def test_observations_of_many_threads_are_not_lost() -> None:
    counts = Counts()
    taken: list[float] = []

    def observe() -> None:
        for _ in range(MAX_OBSERVATIONS // 4):
            counts.observe("seconds", 0.5)

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += counts.take_observations().get("seconds", [])
    taken += counts.take_observations().get("seconds", [])

    assert taken == [0.5] * MAX_OBSERVATIONS
    assert counts.take_observations() == {}


def test_observations_are_taken_a_few_at_a_time_and_the_latest_are_kept() -> None:
    counts = Counts()
    for number in range(MAX_OBSERVATIONS + 3):
        counts.observe("seconds", number)
    counts.observe("others", 1, 2)

    assert counts.take_observations(2) == {"seconds": [3, 4], "others": [1, 2]}
    assert counts.take_observations(1) == {"seconds": [5]}
    assert len(counts.take_observations()["seconds"]) == MAX_OBSERVATIONS - 3


def test_writer_survives_exceptions_of_entries_and_callbacks(store: Store) -> None:
    told: list[bool] = []

    def done(_: EntryKey, stored: bool) -> None:
        told.append(stored)
        raise KeyError("bug")

    def make() -> Entry:
        raise KeyError("float64")

    writer = Writer(store, done=done)
    submit(writer, EntryKey(NAMESPACE, "a"), SIZE, make)
    submit(writer, EntryKey(NAMESPACE, "b"), SIZE, entry)
    writer.close()

    assert told == [False, True]
    assert (writer.counts["drops"], writer.counts["exceptions"]) == (1, 3)


@pytest.mark.parametrize("asks", [True, False])
def test_a_present_entry_is_leased_against_eviction(store: Store, asks: bool) -> None:
    store.put(EntryKey(NAMESPACE, "present"), entry())
    leased: list[str] = []

    class Leasing(Paused):
        def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
            assert seconds == 60
            leased.extend(key.identifier for key in keys)
            return self.store.lease(keys, seconds)

    leasing = Leasing(store)
    leasing.go.set()
    writer = Writer(leasing, asks=asks)
    for name in ("present", "new"):
        submit(writer, EntryKey(NAMESPACE, name), SIZE, entry)
    writer.close()

    assert leased == (["present", "new"] if asks else ["present"])
    assert (writer.counts["known"], writer.counts["saves"]) == (1, 1)
