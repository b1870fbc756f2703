"""Fetching of entries into this process's memory on threads, without a wait for the caller."""

import enum
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Protocol

from ec_store.concurrency import Breaker, DaemonPool
from ec_store.counts import Counts
from ec_store.engine.entry_memory import EntryMemory, buffer_bytes
from ec_store.engine.fetch_queue import Fetch, FetchQueue, Phase, Want
from ec_store.entry import HeldEntry
from ec_store.keys import EntryKey, key_or_none

THREADS = 4
MEMORY_BYTES = 1024**3
RETRY_S = (0.002, 0.005, 0.01, 0.02, 0.05)
"""Delays in seconds between two lookups of a promised entry; the last one is repeated."""

CHECK_EVERY_S = 0.005
"""Interval in seconds at which running fetches are compared with their deadlines."""


class EntrySource(Protocol):
    """Source of entries: a store, or a layer that places a store's entries in other memory."""

    def get(self, key: EntryKey) -> HeldEntry | None:
        """Read an entry, as `Store.get` does."""


class FetchState(enum.Enum):
    """State of a fetch, as the caller sees it."""

    PENDING = "pending"
    READY = "ready"
    MISSING = "missing"


@dataclass(eq=False)
class Fetcher:
    """Fetcher of entries on threads, which holds them within a memory budget.

    All methods are for one thread, the engine's scheduler, and access neither disk nor network.
    Only `wait_for_result` waits.

    A fetch's deadline starts when a thread takes it: time in the queue does not count. A fetch that
    is late counts as missing, and as a failure for the breaker; its entry is kept if it arrives
    later. When the breaker opens, or when all threads hang, all waiting fetches become missing at
    once. Threads start with the first fetches. If none can be started, each fetch is a miss.

    Attributes:
        store: source of the entries.
        namespace: namespace of all entries.
        counts: gets `hits`, `misses`, `timeouts`, `late`, `bypassed`, `errors`, `bytes`. An entry
            that `Want.accept` rejects is a miss. For each fetch, `fetch_wait_seconds` observes the
            time in the queue, and `fetch_seconds` the time on a thread.
        timeout_s: upper bound of the time on a thread for one entry.
        promise_timeout_s: how long a promised entry is looked up, from the first lookup on. The
            last lookup starts then, or when a thread is free, and may take `timeout_s` more.
        memory_bytes: memory budget for pinned entries, kept entries, and reservations.
        threads: number of entries fetched at once.
        keeps: whether entries stay in memory after their last pin, while there is room.
        wait_s: how long a step of the engine may wait for results, in total.
        clock: monotonic clock in seconds.
    """

    store: EntrySource
    namespace: str
    _: KW_ONLY
    counts: Counts = field(default_factory=Counts)
    timeout_s: float = 1.0
    promise_timeout_s: float = 5.0
    memory_bytes: int = MEMORY_BYTES
    threads: int = THREADS
    keeps: bool = True
    wait_s: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._pool = DaemonPool(self.threads, "ec-fetch")
        self._memory = EntryMemory(self.memory_bytes, keeps=self.keeps)
        self._queue = FetchQueue()
        self._fetches: dict[str, Fetch] = {}
        self._results: deque[Fetch] = deque()
        self._arrived = threading.Event()
        self._timers: list[tuple[float, int, Fetch]] = []
        self._numbers = count()
        self._hanging = 0
        self._check_s = 0.0
        self._breaker = Breaker("reading from the encoder store", clock=self.clock)

    def has_room(self, wants: Mapping[str, Want]) -> bool:
        """Return whether the budget has room for all of these entries, as `EntryMemory.has_room`.

        An entry that would not be fetched needs no room.
        """
        sizes = {
            identifier: buffer_bytes(want.size_bytes)
            for identifier, want in wants.items()
            if self.entry(identifier) is not None or not self._bypasses(want.promised)
        }
        return self._memory.has_room(sizes)

    def acquire(self, identifier: str, want: Want) -> FetchState:
        """Pin an entry, and fetch it unless it is held or already being fetched.

        Returns:
            READY: the entry is held until `release`. PENDING: the entry is being fetched, and
            `process_results` reports the result; `release` cancels the pin. MISSING: the entry
            was not pinned.
        """
        if self._memory.entry(identifier) is not None:
            self._memory.pin(identifier)
            return FetchState.READY
        fetch = self._fetches.get(identifier) or self._start(identifier, want)
        if fetch is None:
            return FetchState.MISSING
        if fetch.overdue:
            self.counts.add(bypassed=1)
            return FetchState.MISSING
        fetch.promised |= want.promised
        self._memory.pin(identifier)
        return FetchState.PENDING

    def release(self, identifier: str) -> None:
        """Release one pin. A waiting fetch without another pin is cancelled."""
        self._memory.unpin(identifier)
        fetch = self._fetches.get(identifier)
        if fetch and not self._memory.is_pinned(identifier) and self._queue.cancel(fetch):
            self._forget(fetch)

    def process_results(self) -> list[tuple[str, FetchState]]:
        """Process results of the threads, and expired deadlines.

        Returns:
            Identifiers of pinned entries that were pending: READY, still pinned, or MISSING, no
            longer pinned.
        """
        now = self.clock()
        if not self._results and now < self._check_s:
            return []
        settled: list[tuple[str, FetchState]] = []
        before = self._refusals()
        while self._results:
            settled += self._finish(self._results.popleft(), now)
        for fetch in self._queue.late_fetches(
            lambda want: not want.overdue and now >= self._deadline(want)
        ):
            settled += self._time_out(fetch)
        while self._timers and self._timers[0][0] <= now:
            fetch = heapq.heappop(self._timers)[-1]
            if fetch.phase is Phase.RESTING:  # not cancelled or bypassed meanwhile
                self._submit(fetch)
        if self._refusals() != before:
            settled += self._bypass()
        first = self._timers[0][0] if self._timers else now + CHECK_EVERY_S
        self._check_s = min(first, now + CHECK_EVERY_S)
        return settled

    def is_first_lookup(self, identifier: str) -> bool:
        """Return whether an entry is being looked up, and no lookup of it has ended before."""
        fetch = self._fetches.get(identifier)
        return fetch is not None and not fetch.looks and not fetch.overdue

    def wait_for_result(self, seconds: float) -> None:
        """Wait until `process_results` has a result of a thread, for at most this long."""
        self._arrived.clear()
        if not self._results:
            self._arrived.wait(seconds)

    def entry(self, identifier: str) -> HeldEntry | None:
        return self._memory.entry(identifier)

    def discard(self, identifier: str) -> None:
        """Drop a held entry without pins: the next request fetches it again."""
        self._memory.discard(identifier)

    def gauges(self) -> dict[str, float]:
        """Return memory by use, the depth of the queue, and whether the breaker is open."""
        waiting_bytes = self._queue.waiting_bytes
        return {
            "held_bytes": self._memory.held_bytes,
            "pinned_bytes": self._memory.pinned_bytes,
            "queued_bytes": waiting_bytes,
            "inflight_bytes": self._memory.reserved_bytes - waiting_bytes,
            "queue_depth": self._queue.depth,
            "breaker_open": float(self._bypasses(promised=False)),
        }

    def close(self) -> None:
        self._pool.close()

    def _refusals(self) -> tuple[bool, bool]:
        """Return whether all threads hang, and whether the breaker is open."""
        return self._hanging >= self._pool.capacity, self._breaker.open

    def _bypasses(self, promised: bool) -> bool:
        hanging, opened = self._refusals()
        return hanging or (opened and not promised)

    def _start(self, identifier: str, want: Want) -> Fetch | None:
        if self._bypasses(want.promised):
            self.counts.add(bypassed=1)
            return None
        key = key_or_none(self.namespace, identifier)
        if key is None:
            self.counts.add(misses=1)
            return None
        asked_s = self.clock() if want.asked_s is None else want.asked_s
        fetch = Fetch(identifier, key, want, want.promised, asked_s)
        self._fetches[identifier] = fetch
        self._memory.reserve(identifier, buffer_bytes(want.size_bytes))
        self._submit(fetch)
        return fetch

    def _submit(self, fetch: Fetch) -> None:
        # A repeated lookup is queued as due at the end of its promise: behind first lookups until
        # then, and before later ones.
        due_s = self._promise_end_s(fetch) if fetch.looks else self.clock()
        self._queue.put(fetch, due_s)
        self._pool.queue_job(self._fetch_next, self._drop_next)

    def _fetch_next(self) -> None:
        """Fetch the first entry of the queue. Runs on a thread."""
        fetch = self._queue.take_fetch(self.clock)
        if fetch is None:
            return
        fetch.dropped = False
        try:
            entry = self.store.get(fetch.key)
            fetch.refused = entry is not None and not fetch.want.accept(entry)
            fetch.entry = None if fetch.refused else entry
        except Exception as error:  # noqa: BLE001 - any error counts as the store's failure
            fetch.error = error
        fetch.ended_s = self.clock()
        self._results.append(fetch)
        self._arrived.set()

    def _drop_next(self) -> None:
        """Answer the first fetch of the queue with a miss: there is no thread to run it."""
        fetch = self._queue.take_fetch(self.clock)
        if fetch is not None:
            fetch.ended_s = fetch.taken_s
            fetch.dropped = True
            self._results.append(fetch)
            self._arrived.set()

    def _finish(self, fetch: Fetch, now: float) -> Iterator[tuple[str, FetchState]]:
        self._queue.end_fetch(fetch)
        if not fetch.looks:
            self.counts.observe("fetch_wait_seconds", fetch.first_s - fetch.asked_s)
        self.counts.observe("fetch_seconds", fetch.ended_s - fetch.taken_s)
        if fetch.overdue:
            self._hanging -= 1
            self.counts.add(late=1)
        elif fetch.error is not None:
            self.counts.add(errors=1)
            self._breaker.record_failure(fetch.error)
        else:
            if not fetch.dropped:
                self._breaker.succeeded()
            if fetch.entry is None and self._schedule_lookup(fetch, now):
                return
            self.counts.add(**{"misses" if fetch.entry is None else "hits": 1})
        if fetch.entry is not None:
            self.counts.add(bytes=sum(part.nbytes for part in fetch.entry.parts))
        yield from self._finish_fetch(fetch, fetch.entry)

    def _schedule_lookup(self, fetch: Fetch, now: float) -> bool:
        """Schedule another lookup of a promised entry, unless it is useless.

        Time in the queue does not end a promise: in a burst, the second lookup of an entry runs
        after the first lookups of all others. So the last lookup is the first one that a thread
        starts after the end of the promise.
        """
        pinned = self._memory.is_pinned(fetch.identifier)
        if fetch.refused or not fetch.promised or not pinned:
            return False
        if fetch.taken_s >= self._promise_end_s(fetch):  # the lookup began after the promise's end
            return False
        # Resting occupies no thread, so that other fetches can run.
        fetch.phase = Phase.RESTING
        rest_s = RETRY_S[min(fetch.looks, len(RETRY_S) - 1)]
        fetch.looks += 1
        due_s = min(now + rest_s, self._promise_end_s(fetch))
        heapq.heappush(self._timers, (due_s, next(self._numbers), fetch))
        return True

    def _time_out(self, fetch: Fetch) -> Iterator[tuple[str, FetchState]]:
        fetch.overdue = True
        self._hanging += 1
        self.counts.add(timeouts=1)
        allowed_s = self._deadline(fetch) - fetch.taken_s
        self._breaker.record_failure(f"no answer within {allowed_s:g} s")
        if self._memory.is_pinned(fetch.identifier):
            self._memory.unpin_all(fetch.identifier)
            yield fetch.identifier, FetchState.MISSING

    def _bypass(self) -> Iterator[tuple[str, FetchState]]:
        """End waiting fetches that are now skipped."""
        for fetch in list(self._fetches.values()):
            if self._bypasses(fetch.promised) and self._queue.cancel(fetch):
                self.counts.add(bypassed=1)
                yield from self._finish_fetch(fetch, None)

    def _finish_fetch(
        self, fetch: Fetch, entry: HeldEntry | None
    ) -> Iterator[tuple[str, FetchState]]:
        pinned = self._memory.is_pinned(fetch.identifier)
        if entry is None:
            self._memory.unpin_all(fetch.identifier)
        self._forget(fetch, entry)
        if pinned:
            yield fetch.identifier, FetchState.MISSING if entry is None else FetchState.READY

    def _forget(self, fetch: Fetch, entry: HeldEntry | None = None) -> None:
        del self._fetches[fetch.identifier]
        self._memory.hold_entry(fetch.identifier, entry)

    def _promise_end_s(self, fetch: Fetch) -> float:
        return fetch.first_s + self.promise_timeout_s

    def _deadline(self, fetch: Fetch) -> float:
        promise_s = self._promise_end_s(fetch) if fetch.promised else 0.0
        return max(promise_s, fetch.taken_s + self.timeout_s)
