"""Fetcher: the caller never waits, memory is bounded, and only a slow store is bypassed."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ec_store import Entry, EntryKey, Store, StoreUnavailable, open_store
from ec_store.concurrency import FAILURES, OPEN_S
from ec_store.engine.entry_memory import OVERHEAD_BYTES, buffer_bytes, entry_bytes
from ec_store.engine.fetch_queue import Want
from ec_store.engine.fetcher import CHECK_EVERY_S, Fetcher, FetchState
from ec_store.testing.stores import unchecked
from tests.ec_store.conftest import NoThreads
from tests.ec_store.entries import entry

NAMESPACE = "ns"
SIZE = entry().data.nbytes
WITHIN_S = 30.0
MIB = 2**20


class Clock:
    """Clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Held:
    """Store that answers only when the test releases it, one call at a time or all."""

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        self.entries = dict(entries or {})
        self.asked: list[str] = []
        self.failing: Exception | None = None
        self._results = threading.Semaphore(0)

    def get(self, key: EntryKey) -> Entry | None:
        self.asked.append(key.identifier)
        self._results.acquire(timeout=WITHIN_S)
        if self.failing:
            raise self.failing
        return self.entries.get(key.identifier)

    def answer(self, number: int = 1) -> None:
        self._results.release(number)

    def go(self) -> None:
        self.answer(10_000)


class Asked:
    """Fetcher with the results that it has reported."""

    def __init__(self, store: object, **options: Any) -> None:
        self.fetcher = Fetcher(store, NAMESPACE, **options)  # type: ignore[arg-type]
        self.told: dict[str, FetchState] = {}
        self._fetched = 0

    def fetched(self) -> int:
        """Return how many fetches the threads have finished."""
        observed = self.fetcher.counts.take_observations()
        self._fetched += len(observed.get("fetch_seconds", ()))
        return self._fetched

    def ask(self, identifier: str, size_bytes: int = SIZE, **want: Any) -> FetchState:
        state = self.fetcher.acquire(identifier, Want(size_bytes, **want))
        self.told[identifier] = state
        return state

    def advance(self) -> None:
        self.told.update(self.fetcher.process_results())

    def wait(self, identifier: str) -> FetchState:
        self.until(lambda: self.told[identifier] is not FetchState.PENDING)
        return self.told[identifier]

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline
            self.advance()
            time.sleep(0.001)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"file://{tmp_path}/store") as opened:
        yield opened


Make = Callable[..., Asked]


@pytest.fixture
def fetching() -> Iterator[Make]:
    """Yield a function that makes fetchers; close them at the end."""
    made: list[tuple[object, Asked]] = []

    def make(store: object, **options: Any) -> Asked:
        made.append((store, Asked(store, **options)))
        return made[-1][1]

    yield make
    for store, asked in made:
        if isinstance(store, Held):
            store.go()
        asked.fetcher.close()


def large(mebibytes: int) -> Entry:
    """Return an entry that is read into a buffer of its own."""
    return entry(shape=(mebibytes * MIB // 4, 2))


def test_fetched_entry_is_kept_while_it_is_pinned(store: Store, fetching: Make) -> None:
    store.put(EntryKey(NAMESPACE, "k"), entry())
    asked = fetching(store)

    assert asked.ask("k") is FetchState.PENDING
    assert asked.wait("k") is FetchState.READY
    store.delete([EntryKey(NAMESPACE, "k")])
    assert asked.fetcher.entry("k") == entry()
    assert asked.ask("k") is FetchState.READY


def test_missing_entry_is_looked_for_again(store: Store, fetching: Make) -> None:
    asked = fetching(store)
    asked.ask("k")
    assert asked.wait("k") is FetchState.MISSING
    store.put(EntryKey(NAMESPACE, "k"), entry())
    asked.ask("k")

    assert asked.wait("k") is FetchState.READY


@pytest.mark.parametrize("promised", [False, True])
def test_refused_entry_is_missing_at_once(store: Store, fetching: Make, promised: bool) -> None:
    """The fetcher does not look up a refused entry again, even if promised: it is the same."""
    store.put(EntryKey(NAMESPACE, "k"), entry())
    seen: list[tuple[Entry, str]] = []

    def accept(one: Entry) -> bool:
        seen.append((one, threading.current_thread().name))
        return False

    asked = fetching(store, clock=Clock())
    asked.ask("k", accept=accept, promised=promised)

    assert asked.wait("k") is FetchState.MISSING
    assert asked.fetcher.entry("k") is None
    [(found, thread)] = seen
    assert found == entry()
    assert thread != threading.current_thread().name
    figures = asked.fetcher.counts.take_counts()
    assert (figures.get("hits", 0), figures["misses"]) == (0, 1)


def test_discarded_entry_is_fetched_again_unless_it_is_pinned(store: Store, fetching: Make) -> None:
    store.put(EntryKey(NAMESPACE, "k"), entry())
    asked = fetching(store)
    asked.fetcher.discard("k")
    asked.ask("k")
    asked.wait("k")
    asked.fetcher.discard("k")
    assert asked.fetcher.entry("k") == entry()
    asked.fetcher.release("k")
    asked.fetcher.discard("k")

    assert asked.fetcher.entry("k") is None
    assert asked.fetcher.gauges()["held_bytes"] == 0


@pytest.mark.parametrize("entries", [10, 40])
def test_burst_loses_nothing_however_long_it_queues(fetching: Make, entries: int) -> None:
    """Each answer takes half of the deadline, so the last fetch is queued for many deadlines."""
    clock = Clock()
    names = [str(number) for number in range(entries)]
    held = Held({name: entry() for name in names})
    asked = fetching(held, timeout_s=1.0, threads=1, clock=clock)
    for name in names:
        asked.ask(name)
    for number, name in enumerate(names):
        asked.until(lambda number=number: len(held.asked) > number)  # type: ignore[misc]
        clock.now += 0.5
        asked.advance()
        held.answer()
        assert asked.wait(name) is FetchState.READY

    assert held.asked == names
    assert asked.fetcher.counts["timeouts"] == 0
    observed = asked.fetcher.counts.take_observations()
    assert observed["fetch_wait_seconds"] == [0.5 * number for number in range(entries)]
    assert observed["fetch_seconds"] == [0.5] * entries


def test_queue_is_ordered_by_rank_then_by_age(fetching: Make) -> None:
    held = Held()
    asked = fetching(held, threads=1)
    asked.ask("first")
    asked.until(lambda: held.asked)
    for name, rank in (("a", 5), ("b", 5), ("urgent", -1), ("c", 5)):
        asked.ask(name, rank=rank)
    held.go()
    asked.wait("c")

    assert held.asked == ["first", "urgent", "a", "b", "c"]


@pytest.mark.fault(25)
@pytest.mark.parametrize("threads", [1, 2, 4, 16])
def test_hung_store_ends_all_fetches_after_one_deadline(fetching: Make, threads: int) -> None:
    """Running fetches time out; queued fetches miss at the same time, not one deadline later."""
    clock, held = Clock(), Held()
    asked = fetching(held, timeout_s=1.0, threads=threads, clock=clock)
    names = [str(number) for number in range(64)]
    assert {asked.ask(name) for name in names} == {FetchState.PENDING}
    asked.until(lambda: len(held.asked) == threads)
    clock.now = 0.9
    asked.advance()
    assert set(asked.told.values()) == {FetchState.PENDING}
    clock.now = 1.0
    asked.advance()

    assert set(asked.told.values()) == {FetchState.MISSING}
    figures = asked.fetcher.counts.take_counts()
    assert (figures["timeouts"], figures["bypassed"]) == (threads, 64 - threads)
    assert asked.ask("next") is FetchState.MISSING
    assert asked.fetcher.gauges()["breaker_open"] == 1


@pytest.mark.fault(25)
def test_hung_threads_are_not_waited_for_after_the_breaker(fetching: Make) -> None:
    """Promised entries miss too until a thread returns."""
    clock, held = Clock(), Held({"late": entry(), "next": entry()})
    asked = fetching(held, timeout_s=1.0, threads=2, clock=clock)
    asked.ask("late")
    asked.ask("other")
    asked.until(lambda: len(held.asked) == 2)
    clock.now = 1.0
    asked.advance()
    clock.now += OPEN_S + 1

    assert asked.ask("next", promised=True) is FetchState.MISSING
    assert asked.ask("late") is FetchState.MISSING
    held.go()
    asked.until(lambda: asked.fetcher.entry("late") is not None)
    assert asked.fetcher.counts["late"] >= 1
    asked.ask("next")
    assert asked.wait("next") is FetchState.READY


def test_entry_that_comes_late_is_kept(fetching: Make) -> None:
    clock, held = Clock(), Held({"k": entry()})
    asked = fetching(held, timeout_s=1.0, clock=clock)
    asked.ask("k")
    asked.until(lambda: held.asked)
    clock.now = 1.0
    asked.advance()
    assert asked.told["k"] is FetchState.MISSING
    assert asked.fetcher.gauges()["inflight_bytes"] == buffer_bytes(SIZE)
    held.go()
    asked.until(lambda: asked.fetcher.entry("k"))

    assert asked.ask("k") is FetchState.READY
    assert asked.fetcher.gauges()["inflight_bytes"] == 0


def test_aborted_request_frees_its_place_and_its_room(fetching: Make) -> None:
    held = Held({"running": entry()})
    asked = fetching(held, threads=1)
    for name in ("running", "waiting", "shared", "shared"):
        asked.ask(name)
    asked.until(lambda: held.asked)
    for name in ("running", "waiting", "shared"):
        asked.fetcher.release(name)
    gauges = asked.fetcher.gauges()
    assert gauges["queue_depth"] == 1
    assert gauges["queued_bytes"] == gauges["inflight_bytes"] == buffer_bytes(SIZE)
    held.go()
    asked.wait("shared")

    assert held.asked == ["running", "shared"]
    assert asked.fetcher.entry("running") is not None
    assert asked.told["running"] is FetchState.PENDING


def test_promised_entry_is_waited_for(store: Store, fetching: Make) -> None:
    asked = fetching(store)
    asked.ask("k", promised=True)
    until_s = time.monotonic() + 0.05
    asked.until(lambda: time.monotonic() > until_s)
    assert asked.told["k"] is FetchState.PENDING
    store.put(EntryKey(NAMESPACE, "k"), entry())

    assert asked.wait("k") is FetchState.READY
    assert asked.fetcher.counts["misses"] == 0


def test_broken_promises_hold_no_other_fetch_up(store: Store, fetching: Make) -> None:
    store.put(EntryKey(NAMESPACE, "k"), entry())
    asked = fetching(store, threads=2, promise_timeout_s=WITHIN_S)
    for number in range(16):
        asked.ask(f"promised-{number}", promised=True)
    asked.ask("k")

    assert asked.wait("k") is FetchState.READY
    assert Counter(asked.told.values())[FetchState.PENDING] == 16


def test_promise_is_waited_for_only_so_long(store: Store, fetching: Make) -> None:
    clock = Clock()
    asked = fetching(store, promise_timeout_s=5.0, clock=clock)
    asked.ask("k", promised=True)
    for looks, now in ((1, 0.0), (2, 1.0), (3, 4.9)):
        clock.now = now
        asked.until(lambda looks=looks: asked.fetched() == looks)  # type: ignore[misc]
        assert asked.told["k"] is FetchState.PENDING
    clock.now = 5.1

    assert asked.wait("k") is FetchState.MISSING
    assert (asked.fetcher.counts["misses"], asked.fetcher.counts["timeouts"]) == (1, 0)


@pytest.mark.parametrize("comes", [True, False])
def test_lookup_that_starts_after_the_promise_expired_is_the_last(
    fetching: Make, comes: bool
) -> None:
    """Time in the queue does not count: the second lookup waits while another fetch runs."""
    clock, held = Clock(), Held()
    asked = fetching(held, threads=1, timeout_s=60.0, promise_timeout_s=5.0, clock=clock)
    asked.ask("k", promised=True)
    asked.until(lambda: held.asked)
    asked.ask("other")
    held.answer()
    asked.until(lambda: held.asked == ["k", "other"] and asked.fetched())
    clock.now = 1.0
    asked.advance()
    assert asked.fetcher.gauges()["queue_depth"] == 1
    clock.now = 6.0
    asked.advance()
    assert asked.told == {"k": FetchState.PENDING, "other": FetchState.PENDING}
    if comes:
        held.entries["k"] = entry()
    held.go()

    assert asked.wait("k") is (FetchState.READY if comes else FetchState.MISSING)
    assert held.asked == ["k", "other", "k"]
    assert asked.fetcher.gauges()["queue_depth"] == 0


def test_promise_ends_though_new_fetches_keep_all_threads_busy(fetching: Make) -> None:
    """A second lookup runs after the first lookups queued before its deadline, not after all."""
    clock, held = Clock(), Held()
    asked = fetching(held, threads=1, timeout_s=60.0, promise_timeout_s=5.0, clock=clock)
    asked.ask("k", promised=True)
    asked.until(lambda: held.asked == ["k"])
    asked.ask("in time")
    held.answer()
    asked.until(lambda: held.asked == ["k", "in time"] and asked.fetched())
    clock.now = 1.0
    asked.advance()  # queues the second lookup of "k"
    asked.ask("before its end")
    clock.now = 5.1
    asked.ask("after its end")
    held.go()

    assert asked.wait("k") is FetchState.MISSING
    asked.wait("after its end")
    assert held.asked == ["k", "in time", "before its end", "k", "after its end"]


def test_burst_of_promised_entries_returns_all_that_arrive_in_time(fetching: Make) -> None:
    """The first lookups of all entries together take longer than a promise lasts."""
    first_s: dict[str, float] = {}

    class Late:
        def get(self, key: EntryKey) -> Entry | None:
            time.sleep(0.002)
            now_s = time.monotonic()
            return entry() if now_s > first_s.setdefault(key.identifier, now_s) + 0.02 else None

    asked = fetching(Late(), threads=2, promise_timeout_s=0.1)
    names = [str(number) for number in range(400)]
    for name in names:
        asked.ask(name, promised=True)

    asked.until(lambda: FetchState.PENDING not in asked.told.values())
    assert Counter(asked.told.values()) == {FetchState.READY: 400}


def test_promise_counts_for_a_fetch_begun_without(store: Store, fetching: Make) -> None:
    clock = Clock()
    asked = fetching(store, clock=clock)
    asked.ask("k")
    asked.ask("k", promised=True)
    asked.until(asked.fetched)
    store.put(EntryKey(NAMESPACE, "k"), entry())
    clock.now = 4.0

    assert asked.wait("k") is FetchState.READY


@pytest.mark.fault(16)
def test_a_failing_store_is_skipped_for_a_while(fetching: Make) -> None:
    clock, held = Clock(), Held()
    held.failing = StoreUnavailable("away")
    held.go()
    asked = fetching(held, clock=clock)
    for number in range(FAILURES):
        asked.ask(str(number))
        assert asked.wait(str(number)) is FetchState.MISSING
    calls = len(held.asked)

    assert asked.ask("next") is FetchState.MISSING
    assert len(held.asked) == calls
    clock.now += OPEN_S + 1
    assert asked.ask("next") is FetchState.PENDING


def test_promised_entries_are_fetched_while_the_breaker_is_open(fetching: Make) -> None:
    held = Held({"promised": entry()})
    held.failing = StoreUnavailable("away")
    asked = fetching(held, threads=1, clock=Clock())
    for name in ("0", "1", "2", "taken", "waiting"):
        asked.ask(name)
    asked.ask("promised", promised=True)
    held.answer(FAILURES)
    asked.wait("waiting")
    assert asked.told["promised"] is FetchState.PENDING
    held.failing = None
    held.go()

    assert asked.wait("promised") is FetchState.READY
    assert "waiting" not in held.asked


def test_pinned_entries_stay_and_others_go_by_last_use(store: Store, fetching: Make) -> None:
    for name in "abc":
        store.put(EntryKey(NAMESPACE, name), entry(ord(name)))
    asked = fetching(store, memory_bytes=2 * buffer_bytes(SIZE) + 1000)
    for name in "abc":
        asked.ask(name)
        asked.wait(name)
        if name != "a":
            asked.fetcher.release(name)
    there = [asked.fetcher.entry(name) is not None for name in "abc"]

    assert there == [True, False, True]
    asked.fetcher.release("a")
    asked.ask("b")
    asked.wait("b")
    assert asked.fetcher.entry("c") is None
    assert asked.fetcher.entry("a") is not None


class Alive:
    """Store of large entries that tracks how many bytes of its buffers are alive."""

    def __init__(self, mebibytes: int) -> None:
        self.size_bytes = mebibytes * MIB
        self.most_bytes = 0
        self._buffers: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()

    class Buffer(bytearray):
        """bytearray that supports weak references."""

    def get(self, _: EntryKey) -> Entry:
        buffer = self.Buffer(self.size_bytes)
        with self._lock:
            self._buffers.append(weakref.ref(buffer))
            self.most_bytes = max(self.most_bytes, self.alive_bytes())
        return replace(large(self.size_bytes // MIB), data=memoryview(buffer))

    def alive_bytes(self) -> int:
        return sum(self.size_bytes for one in self._buffers if one() is not None)


@pytest.mark.parametrize("requests", [20, 60])
def test_live_memory_is_bounded_while_results_are_not_polled(fetching: Make, requests: int) -> None:
    """The fetcher admits entries up to the budget and keeps their results for the scheduler."""
    alive = Alive(2)
    budget = 10 * buffer_bytes(alive.size_bytes)
    asked = fetching(alive, memory_bytes=budget)
    admitted = []
    for number in range(requests):
        if not asked.fetcher.has_room({str(number): Want(alive.size_bytes)}):
            break
        admitted.append(str(number))
        asked.ask(str(number), alive.size_bytes)

    assert len(admitted) == 10
    asked.until(lambda: len(asked.fetcher._results) + asked.fetched() == 10)  # noqa: SLF001
    assert alive.most_bytes <= budget
    assert asked.fetcher.gauges()["held_bytes"] <= budget


@pytest.mark.parametrize("rounds", [30, 90])
def test_kept_memory_is_bounded_by_live_memory(fetching: Make, rounds: int) -> None:
    alive = Alive(2)
    budget = 4 * buffer_bytes(alive.size_bytes)
    asked = fetching(alive, memory_bytes=budget)
    for number in range(rounds):
        asked.ask(str(number), alive.size_bytes)
        asked.wait(str(number))
        asked.fetcher.release(str(number))
    gc.collect()

    assert alive.most_bytes <= budget
    assert 0 < alive.alive_bytes() <= budget
    held = [n for n in range(rounds) if asked.fetcher.entry(str(n))]
    assert held == list(range(rounds - 4, rounds))


@pytest.mark.parametrize("mebibytes", [1, 2, 3, 5, 8])
def test_buffers_count_with_their_real_size_which_is_reserved(
    store: Store, fetching: Make, mebibytes: int
) -> None:
    one = large(mebibytes)
    store.put(EntryKey(NAMESPACE, "k"), one)
    asked = fetching(store)
    asked.ask("k", one.data.nbytes)
    reserved = asked.fetcher.gauges()
    asked.wait("k")
    gauges = asked.fetcher.gauges()
    found = asked.fetcher.entry("k")
    assert found is not None

    assert reserved["queued_bytes"] + reserved["inflight_bytes"] == gauges["held_bytes"]
    assert gauges["held_bytes"] == gauges["pinned_bytes"] == entry_bytes(found)
    assert entry_bytes(found) == OVERHEAD_BYTES + len(found.parts[0].obj)  # type: ignore[arg-type]
    assert entry_bytes(found) % (2 * MIB) == OVERHEAD_BYTES


def test_refused_entries_leave_memory_on_their_thread(fetching: Make) -> None:
    """The thread releases a refused entry of another size at once, before the scheduler polls."""
    alive = Alive(8)
    asked = fetching(alive, threads=2)
    for number in range(20):
        asked.ask(str(number), SIZE, accept=lambda one: one.data.nbytes == SIZE)
    asked.until(lambda: asked.fetcher.counts["misses"] == 20)

    assert alive.most_bytes <= 4 * alive.size_bytes


@pytest.mark.parametrize("waiting", [100, 1000])
def test_poll_checks_only_running_fetches_and_not_at_every_call(
    fetching: Make, waiting: int
) -> None:
    """A call checks only running fetches, and not at every call."""
    clock, held = Clock(), Held()
    asked = fetching(held, threads=4, clock=clock)
    for number in range(waiting):
        asked.ask(str(number))
    asked.until(lambda: len(held.asked) == 4)
    looked = Counter[str]()
    queue = asked.fetcher._queue  # noqa: SLF001
    late = queue.late_fetches

    def counting(is_late: Any) -> Any:
        def counted(one: Any) -> Any:
            looked["fetches"] += 1
            return is_late(one)

        return late(counted)

    object.__setattr__(asked.fetcher, "_queue", _Spy(queue, counting))
    clock.now += CHECK_EVERY_S
    for _ in range(1000):
        asked.advance()

    assert looked["fetches"] == 4


class _Spy:
    """Wrapper that replaces the method `late_fetches` of an object."""

    def __init__(self, spied: Any, late: Any) -> None:
        self.__dict__.update(_spied=spied, late_fetches=late)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_spied"], name)


def test_a_process_ends_while_a_fetch_hangs() -> None:
    code = (
        "import time\n"
        "from ec_store.engine.fetch_queue import Want\n"
        "from ec_store.engine.fetcher import Fetcher\n"
        "class Hanging:\n"
        "    def get(self, key):\n"
        "        time.sleep(60)\n"
        "fetcher = Fetcher(Hanging(), 'ns')\n"
        "fetcher.acquire('k', Want(8))\n"
        "time.sleep(0.2)\n"
        "fetcher.close()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


@pytest.mark.fault(20)
def test_malformed_entries_do_not_open_the_breaker(store: Store, fetching: Make) -> None:
    names = [str(number) for number in range(FAILURES)]
    for name in names:
        floats = unchecked(entry(shape=(2**10, 2**10)), shape=(2.0**10, 2.0**10))
        store.put(EntryKey(NAMESPACE, name), floats)
    store.put(EntryKey(NAMESPACE, "good"), entry())
    asked = fetching(store)

    for name in names:
        asked.ask(name)
        assert asked.wait(name) is FetchState.MISSING
    asked.ask("good")
    assert asked.wait("good") is FetchState.READY
    assert store.counts["corrupt"] == FAILURES
    assert asked.fetcher.counts.take_counts()["misses"] == FAILURES


@pytest.mark.fault(87)
def test_fetches_are_misses_while_no_thread_can_be_started(
    store: Store, fetching: Make, no_threads: NoThreads
) -> None:
    store.put(EntryKey(NAMESPACE, "k"), entry())
    asked = fetching(store, promise_timeout_s=0.05)
    with no_threads():
        asked.ask("k")
        assert asked.wait("k") is FetchState.MISSING
        asked.ask("promised", promised=True)
        assert asked.wait("promised") is FetchState.MISSING
    figures = asked.fetcher.counts.take_counts()

    assert (figures["misses"], figures.get("hits", 0)) == (2, 0)
    assert asked.fetcher.gauges()["queue_depth"] == 0
    asked.ask("k")
    assert asked.wait("k") is FetchState.READY


@pytest.mark.fault(87)
def test_fetches_without_a_thread_count_neither_for_nor_against_the_store(
    fetching: Make, no_threads: NoThreads
) -> None:
    """The last of three failures in a row opens the breaker."""
    held = Held()
    held.failing = StoreUnavailable("away")
    held.go()
    asked = fetching(held, clock=Clock())
    breaker = asked.fetcher._breaker  # noqa: SLF001 - without a thread, no fetch fails
    for _ in range(FAILURES - 1):
        breaker.record_failure("away")
    with no_threads():
        asked.ask("dropped")
        assert asked.wait("dropped") is FetchState.MISSING
    assert not breaker.open
    asked.ask("fails")
    assert asked.wait("fails") is FetchState.MISSING
    assert breaker.open


@pytest.mark.fault(87)
def test_promised_fetch_that_gets_a_thread_later_counts_for_the_store(
    store: Store, fetching: Make, no_threads: NoThreads
) -> None:
    store.put(EntryKey(NAMESPACE, "promised"), entry())
    asked = fetching(store)
    breaker = asked.fetcher._breaker  # noqa: SLF001 - without a thread, no fetch fails
    for _ in range(FAILURES - 1):
        breaker.record_failure("away")
    with no_threads():
        asked.ask("promised", promised=True)
        asked.until(lambda: asked.fetched() == 1)
    assert asked.wait("promised") is FetchState.READY
    breaker.record_failure("away")
    assert not breaker.open


@pytest.mark.fault(87)
def test_fetches_end_while_the_only_thread_hangs_and_no_other_can_be_started(
    fetching: Make, no_threads: NoThreads
) -> None:
    held, clock = Held(), Clock()
    asked = fetching(held, clock=clock, timeout_s=1.0)
    asked.ask("hangs")
    asked.until(lambda: held.asked)
    with no_threads():
        asked.ask("waits")
        clock.now = 2.0
        assert asked.wait("hangs") is FetchState.MISSING
        assert asked.told["waits"] is FetchState.MISSING
