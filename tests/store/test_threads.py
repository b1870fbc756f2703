"""Fetcher and writer: nobody who asks them waits."""

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ec_store import Entry, EntryInfo, EntryKey, Store, StoreUnavailable, open_store
from ec_store.breaker import FAILURES, OPEN_S
from ec_store.counts import Counts
from ec_store.fetcher import THREADS, Fetcher, State
from ec_store.writer import Writer
from tests.store.entries import entry

NAMESPACE = "ns"
SIZE = entry().data.nbytes


class Paused:
    """A real store whose calls wait, or fail, until they are let go."""

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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def settled(fetcher: Fetcher, identifier: str) -> State:
    state = State.PENDING

    def is_settled() -> bool:
        nonlocal state
        state = fetcher.poll(identifier)
        return state is not State.PENDING

    until(is_settled)
    return state


def make_fetcher(store: object, **more: object) -> Fetcher:
    return Fetcher(store, NAMESPACE, **more)  # type: ignore[arg-type]


def test_an_entry_is_pending_then_ready_and_held(store: Store) -> None:
    store.put(EntryKey(NAMESPACE, "k"), entry())
    fetcher = make_fetcher(store)

    assert fetcher.poll("k") is State.PENDING
    assert settled(fetcher, "k") is State.READY
    assert fetcher.entry("k") == entry()
    store.delete([EntryKey(NAMESPACE, "k")])
    assert fetcher.poll("k") is State.READY
    fetcher.close()


def test_what_is_not_there_is_missing_and_looked_for_again(store: Store) -> None:
    fetcher = make_fetcher(store)

    assert fetcher.poll("k") is State.PENDING
    assert settled(fetcher, "k") is State.MISSING
    store.put(EntryKey(NAMESPACE, "k"), entry())
    assert fetcher.poll("k") is State.PENDING
    assert settled(fetcher, "k") is State.READY
    fetcher.close()


@pytest.mark.fault(25)
def test_a_paused_store_holds_nobody_up_and_ends_at_the_deadline(paused: Paused) -> None:
    clock = Clock()
    fetcher = make_fetcher(paused, timeout_s=1.0, clock=clock)
    started = time.perf_counter()
    states = {fetcher.poll(str(number)) for number in range(64)}
    assert time.perf_counter() - started < 30  # it would be a minute each

    assert states == {State.PENDING}
    clock.now = 1.5
    assert {fetcher.poll(str(number)) for number in range(64)} == {State.MISSING}
    assert fetcher.counts["timeouts"] == 64
    fetcher.close()


def test_a_promised_entry_is_waited_for(store: Store) -> None:
    fetcher = make_fetcher(store)

    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        assert fetcher.poll("k", promised=True) is State.PENDING
    store.put(EntryKey(NAMESPACE, "k"), entry())
    until(lambda: fetcher.poll("k", promised=True) is State.READY)
    assert fetcher.counts["misses"] == 0
    fetcher.close()


def test_promises_that_are_not_kept_hold_no_other_fetch_up(store: Store) -> None:
    store.put(EntryKey(NAMESPACE, "k"), entry())
    fetcher = make_fetcher(store)
    promised = [f"promised-{number}" for number in range(4 * THREADS)]
    for name in promised:
        assert fetcher.poll(name, promised=True) is State.PENDING

    def polled() -> bool:
        for name in promised:
            assert fetcher.poll(name, promised=True) is State.PENDING
        return fetcher.poll("k") is State.READY

    until(polled)
    fetcher.close()


def test_a_promise_is_waited_for_only_so_long(store: Store) -> None:
    clock = Clock()
    fetcher = make_fetcher(store, promise_timeout_s=5.0, clock=clock)
    fetcher.poll("k", promised=True)
    clock.now = 4.9
    assert fetcher.poll("k", promised=True) is State.PENDING
    clock.now = 5.1

    until(lambda: fetcher.poll("k", promised=True) is State.MISSING)
    assert fetcher.counts["misses"] + fetcher.counts["timeouts"] == 1
    fetcher.close()


@pytest.mark.fault(16)
def test_a_store_that_keeps_failing_is_left_alone_for_a_while(paused: Paused) -> None:
    paused.failing = StoreUnavailable("away")
    clock = Clock()
    fetcher = make_fetcher(paused, clock=clock)
    for number in range(FAILURES):
        fetcher.poll(str(number))
        assert settled(fetcher, str(number)) is State.MISSING
    calls = paused.calls

    assert fetcher.poll("next") is State.MISSING
    assert paused.calls == calls
    clock.now += OPEN_S + 1
    assert fetcher.poll("next") is State.PENDING
    fetcher.close()


def test_pinned_entries_stay_and_others_go_by_last_use(store: Store) -> None:
    size = entry().data.nbytes
    for name in "abc":
        store.put(EntryKey(NAMESPACE, name), entry(ord(name)))
    fetcher = make_fetcher(store, keep_bytes=2 * size)
    for name in "abc":
        fetcher.poll(name)
        settled(fetcher, name)
        if name == "a":
            fetcher.pin("a")

    assert [fetcher.entry(name) is not None for name in "abc"] == [True, False, True]
    fetcher.unpin("a")
    fetcher.poll("b")
    settled(fetcher, "b")
    assert fetcher.entry("a") is None
    fetcher.close()


def test_the_writer_writes_what_is_not_there(store: Store) -> None:
    writer = Writer(store)
    made = []

    def make() -> Entry:
        made.append(1)
        return entry()

    key = EntryKey(NAMESPACE, "k")
    assert writer.submit(key, SIZE, make)
    until(lambda: store.get(key) is not None)
    until(lambda: not writer._waiting)  # noqa: SLF001
    assert writer.submit(key, SIZE, make)
    writer.close()

    assert made == [1]
    assert (writer.counts["saves"], writer.counts["known"]) == (1, 1)


def test_a_full_queue_drops_and_counts_and_holds_nobody_up(paused: Paused) -> None:
    writer = Writer(paused, queue_bytes=2 * SIZE)  # type: ignore[arg-type]
    taken = [writer.submit(EntryKey(NAMESPACE, str(n)), SIZE, entry) for n in range(6)]
    paused.go.set()
    writer.close()

    assert taken == [True, True, False, False, False, False]
    assert (writer.counts["drops"], writer.counts["saves"]) == (4, 2)


def test_an_entry_larger_than_the_queue_may_wait_alone(paused: Paused) -> None:
    writer = Writer(paused, queue_bytes=1)  # type: ignore[arg-type]
    taken = [writer.submit(EntryKey(NAMESPACE, str(n)), SIZE, entry) for n in range(2)]
    paused.go.set()
    writer.close()

    assert taken == [True, False]


def test_a_tensor_is_let_go_of_when_it_is_written(store: Store) -> None:
    writer = Writer(store)

    class Tensor:
        def __call__(self) -> Entry:
            return entry()

    tensor = Tensor()
    gone = weakref.ref(tensor)
    writer.submit(EntryKey(NAMESPACE, "k"), SIZE, tensor)
    del tensor
    until(lambda: gone() is None)
    writer.close()


@pytest.mark.fault(17)
@pytest.mark.parametrize("error", [StoreUnavailable("away"), RuntimeError("no memory")], ids=str)
def test_a_write_that_fails_is_counted_and_the_next_one_is_tried(
    paused: Paused, error: Exception
) -> None:
    paused.go.set()
    paused.failing = error
    told: list[tuple[str, bool]] = []
    writer = Writer(paused, done=lambda key, stored: told.append((key.identifier, stored)))  # type: ignore[arg-type]
    writer.submit(EntryKey(NAMESPACE, "a"), SIZE, entry)
    until(lambda: writer.counts["drops"] == 1)
    paused.failing = None
    writer.submit(EntryKey(NAMESPACE, "b"), SIZE, entry)
    writer.close()

    assert paused.store.get(EntryKey(NAMESPACE, "b")) is not None
    assert told == [("a", False), ("b", True)]


@pytest.mark.fault(17)
def test_a_store_that_cannot_be_written_is_left_alone_for_a_while(paused: Paused) -> None:
    paused.go.set()
    paused.failing = StoreUnavailable("full")
    clock = Clock()
    writer = Writer(paused, clock=clock)  # type: ignore[arg-type]
    for number in range(FAILURES):
        assert writer.submit(EntryKey(NAMESPACE, str(number)), SIZE, entry)
        until(lambda number=number: writer.counts["drops"] == number + 1)  # type: ignore[misc]
    calls = paused.calls
    paused.failing = None

    assert not writer.submit(EntryKey(NAMESPACE, "next"), SIZE, entry)
    assert paused.calls == calls
    clock.now += OPEN_S + 1
    assert writer.submit(EntryKey(NAMESPACE, "next"), SIZE, entry)
    writer.close()
    assert writer.counts["saves"] == 1


def test_an_entry_too_large_is_dropped_and_others_are_written(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/small?max_entry_bytes=4096") as small:
        writer = Writer(small)
        large = Entry(memoryview(bytes(8192)), "F32", (1, 2048), "image")
        for number in range(2 * FAILURES):
            writer.submit(EntryKey(NAMESPACE, str(number)), SIZE, lambda: large)
        until(lambda: writer.counts["drops"] == 2 * FAILURES)
        assert writer.submit(EntryKey(NAMESPACE, "k"), SIZE, entry)
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
        taken.append(counts.take().get("hits", 0))
    taken.append(counts.take().get("hits", 0))

    assert sum(taken) == 20000


def test_a_promise_counts_for_a_fetch_that_was_begun_without(store: Store) -> None:
    clock = Clock()
    fetcher = make_fetcher(store, clock=clock)
    assert fetcher.poll("k") is State.PENDING
    future = fetcher._fetches["k"].future  # noqa: SLF001
    assert future is not None
    future.result(60)
    clock.now = 0.9
    assert fetcher.poll("k", promised=True) is State.PENDING
    clock.now = 4.0
    assert fetcher.poll("k", promised=True) is State.PENDING
    store.put(EntryKey(NAMESPACE, "k"), entry())

    def polled() -> bool:
        clock.now += 0.001
        return fetcher.poll("k", promised=True) is not State.PENDING

    until(polled)
    assert fetcher.entry("k") == entry()
    fetcher.close()


class Slow:
    """A store that answers one after the other."""

    def __init__(self) -> None:
        self.answers = threading.Semaphore(0)

    def get(self, _: EntryKey) -> None:
        self.answers.acquire(timeout=60)


def test_a_store_that_answers_is_not_left_alone_for_being_asked_too_much() -> None:
    slow, clock = Slow(), Clock()
    fetcher = make_fetcher(slow, timeout_s=1.0, clock=clock)
    names = [str(number) for number in range(64)]
    for name in names:
        fetcher.poll(name)
    clock.now = 0.5
    slow.answers.release()
    until(lambda: State.MISSING in {fetcher.poll(name) for name in names[:THREADS]})
    clock.now = 1.5
    for name in names:
        fetcher.poll(name)

    assert fetcher.counts["timeouts"] > 50
    assert fetcher.poll("next") is State.PENDING
    slow.answers.release(100)
    fetcher.close()


def test_a_process_ends_while_a_fetch_hangs() -> None:
    code = (
        "import time\n"
        "from ec_store.fetcher import Fetcher\n"
        "class Hanging:\n"
        "    def get(self, key):\n"
        "        time.sleep(60)\n"
        "fetcher = Fetcher(Hanging(), 'ns')\n"
        "fetcher.poll('k')\n"
        "time.sleep(0.2)\n"
        "fetcher.close()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_nothing_ends_the_writer(store: Store) -> None:
    told: list[bool] = []

    def done(_: EntryKey, stored: bool) -> None:
        told.append(stored)
        raise KeyError("bug")

    def make() -> Entry:
        raise KeyError("float64")

    writer = Writer(store, done=done)
    writer.submit(EntryKey(NAMESPACE, "a"), SIZE, make)
    writer.submit(EntryKey(NAMESPACE, "b"), SIZE, entry)
    writer.close()

    assert told == [False, True]
    assert (writer.counts["drops"], writer.counts["exceptions"]) == (1, 3)


def test_an_entry_that_is_known_is_safe_from_eviction(store: Store) -> None:
    key = EntryKey(NAMESPACE, "k")
    store.put(key, entry())
    leased: list[float] = []

    class Leasing(Paused):
        def lease(self, keys: Sequence[EntryKey], seconds: float) -> list[EntryInfo | None]:
            leased.append(seconds)
            return self.store.lease(keys, seconds)

    leasing = Leasing(store)
    leasing.go.set()
    writer = Writer(leasing)  # type: ignore[arg-type]
    writer.submit(key, SIZE, entry)
    writer.close()

    assert (leased, writer.counts["known"]) == ([60.0], 1)
