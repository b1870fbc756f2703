"""Fetcher and writer: nobody who asks them waits."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ec_store import Entry, EntryInfo, EntryKey, Store, StoreUnavailable, open_store
from ec_store.fetcher import BREAKER_FAILURES, BREAKER_OPEN_S, Fetcher, State
from ec_store.writer import Writer
from tests.store.entries import entry

NAMESPACE = "ns"


class Paused:
    """A real store whose calls wait, or fail, until they are let go."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.go = threading.Event()
        self.failing = False
        self.calls = 0

    def _wait(self) -> None:
        self.calls += 1
        if self.failing:
            raise StoreUnavailable("away")
        self.go.wait(10)

    def get(self, key: EntryKey) -> Entry | None:
        self._wait()
        return self.store.get(key)

    def lookup(self, keys: Sequence[EntryKey]) -> list[EntryInfo | None]:
        self._wait()
        return self.store.lookup(keys)

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
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def settled(fetcher: Fetcher, identifier: str) -> State:
    until(fetcher._fetches[identifier].future.done)  # noqa: SLF001
    return fetcher.poll(identifier)


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


def test_a_paused_store_holds_nobody_up_and_ends_at_the_deadline(paused: Paused) -> None:
    clock = Clock()
    fetcher = make_fetcher(paused, timeout_s=1.0, clock=clock)
    started = time.perf_counter()
    states = {fetcher.poll(str(number)) for number in range(64)}
    assert time.perf_counter() - started < 5  # it would be ten seconds each

    assert states == {State.PENDING}
    clock.now = 1.5
    assert {fetcher.poll(str(number)) for number in range(64)} == {State.MISSING}
    assert fetcher.counts["timeouts"] == 64
    fetcher.close()


def test_a_promised_entry_is_waited_for(store: Store) -> None:
    fetcher = make_fetcher(store)

    assert fetcher.poll("k", promised=True) is State.PENDING
    time.sleep(0.05)
    assert fetcher.poll("k", promised=True) is State.PENDING
    store.put(EntryKey(NAMESPACE, "k"), entry())
    assert settled(fetcher, "k") is State.READY
    fetcher.close()


def test_a_promise_is_waited_for_only_so_long(store: Store) -> None:
    clock = Clock()
    fetcher = make_fetcher(store, promise_timeout_s=5.0, clock=clock)
    fetcher.poll("k", promised=True)
    clock.now = 4.9
    assert fetcher.poll("k", promised=True) is State.PENDING
    clock.now = 5.1

    assert fetcher.poll("k", promised=True) is State.MISSING
    fetcher.close()


def test_a_store_that_keeps_failing_is_left_alone_for_a_while(paused: Paused) -> None:
    paused.failing = True
    clock = Clock()
    fetcher = make_fetcher(paused, clock=clock)
    for number in range(BREAKER_FAILURES):
        fetcher.poll(str(number))
        assert settled(fetcher, str(number)) is State.MISSING
    calls = paused.calls

    assert fetcher.poll("next") is State.MISSING
    assert paused.calls == calls
    clock.now += BREAKER_OPEN_S + 1
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
    assert writer.submit(key, make)
    until(lambda: store.get(key) is not None)
    until(lambda: not writer._waiting)  # noqa: SLF001
    assert writer.submit(key, make)
    writer.close()

    assert made == [1]
    assert (writer.counts["saves"], writer.counts["known"]) == (1, 1)


def test_a_full_queue_drops_and_counts_and_holds_nobody_up(paused: Paused) -> None:
    writer = Writer(paused, length=2)  # type: ignore[arg-type]
    taken = [writer.submit(EntryKey(NAMESPACE, str(n)), entry) for n in range(6)]
    drops = writer.counts["drops"]
    paused.go.set()
    writer.close()

    assert taken.count(False) == drops >= 3


def test_a_write_that_fails_is_counted_and_the_next_one_is_tried(paused: Paused) -> None:
    paused.go.set()
    paused.failing = True
    writer = Writer(paused)  # type: ignore[arg-type]
    writer.submit(EntryKey(NAMESPACE, "a"), entry)
    until(lambda: writer.counts["drops"] == 1)
    paused.failing = False
    writer.submit(EntryKey(NAMESPACE, "b"), entry)
    writer.close()

    assert paused.store.get(EntryKey(NAMESPACE, "b")) is not None
