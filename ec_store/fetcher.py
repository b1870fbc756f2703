"""Entries on their way from a store into this process's memory, without anybody waiting."""

import enum
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from ec_store.base import Store
from ec_store.breaker import Breaker
from ec_store.counts import Counts
from ec_store.entry import Entry
from ec_store.errors import StoreError
from ec_store.keys import EntryKey

THREADS = 4
RETRY_S = (0.002, 0.005, 0.01, 0.02, 0.05)
"""Waits between two looks for an entry that was promised; the last one goes on."""


class State(enum.Enum):
    """How far a fetch is."""

    PENDING = "pending"
    READY = "ready"
    MISSING = "missing"


class _Got(NamedTuple):
    entry: Entry | None
    seconds: float


@dataclass(slots=True)
class _Fetch:
    """One entry on its way.

    Attributes:
        future: what a thread finds; None between two looks for an entry that was promised.
        deadline_s: when it counts as missing.
        looks: how many looks for a promised entry have found nothing; None: one is enough.
        again_s: when to look again.
    """

    future: Future[_Got] | None
    deadline_s: float
    looks: int | None
    again_s: float = 0.0


class Fetcher:
    """Fetches entries on threads and holds them until they were used.

    `poll`, `entry`, `pin` and `unpin` touch no disk and no network: they are for the engine's
    scheduler, which calls them from one thread. What they ask for is fetched by others.

    An entry that is pinned stays, whatever happens to the store. The others are kept for as long as
    they fit, the most recently used ones.
    """

    def __init__(  # noqa: PLR0913 - what an operator may set
        self,
        store: Store,
        namespace: str,
        *,
        counts: Counts | None = None,
        timeout_s: float = 1.0,
        promise_timeout_s: float = 5.0,
        keep_bytes: int = 256 * 1024**2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            store: where entries come from.
            namespace: the namespace of all of them.
            counts: gets `hits`, `misses`, `timeouts`, `bypassed`, `errors`, `bytes`, `seconds`.
            timeout_s: after it an entry counts as missing.
            promise_timeout_s: the same for an entry that an encode instance said it writes.
            keep_bytes: host memory for entries that nobody has pinned.
            clock: monotonic.
        """
        self.counts = counts or Counts()
        self._store = store
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._promise_timeout_s = promise_timeout_s
        self._keep_bytes = keep_bytes
        self._clock = clock
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ec-fetch")
        self._fetches: dict[str, _Fetch] = {}
        self._held: OrderedDict[str, Entry] = OrderedDict()
        self._held_bytes = 0
        self._pins: Counter[str] = Counter()
        self._breaker = Breaker("reading from the encoder cache", clock=clock)

    def poll(self, identifier: str, *, promised: bool = False) -> State:
        """How far an entry is; the first call for one that is not held starts a fetch.

        `MISSING` is said once: the next call starts over.
        """
        if identifier in self._held:
            self._held.move_to_end(identifier)
            return State.READY
        fetch = self._fetches.get(identifier)
        if fetch is None:
            return self._start(identifier, promised=promised)
        if fetch.future is not None and fetch.future.done():
            return self._finish(identifier, fetch, fetch.future)
        if self._clock() >= fetch.deadline_s:
            return self._give_up(identifier, fetch)
        if fetch.future is None and self._clock() >= fetch.again_s:
            fetch.future = self._pool.submit(self._get, identifier)
        return State.PENDING

    def entry(self, identifier: str) -> Entry | None:
        """An entry that is held."""
        return self._held.get(identifier)

    def pin(self, identifier: str) -> None:
        """Hold an entry that is ready until `unpin`."""
        self._pins[identifier] += 1

    def is_pinned(self, identifier: str) -> bool:
        """Whether somebody holds the entry."""
        return identifier in self._pins

    def unpin(self, identifier: str) -> None:
        """Take one pin back."""
        self._pins[identifier] -= 1
        if self._pins[identifier] <= 0:
            del self._pins[identifier]
            self._trim()

    def close(self) -> None:
        """Let running fetches end by themselves; no further one is started."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, identifier: str, *, promised: bool) -> State:
        if self._breaker.open and not promised:
            self.counts.add(bypassed=1)
            return State.MISSING
        timeout_s = self._promise_timeout_s if promised else self._timeout_s
        future = self._pool.submit(self._get, identifier)
        looks = 0 if promised else None
        self._fetches[identifier] = _Fetch(future, self._clock() + timeout_s, looks)
        return State.PENDING

    def _get(self, identifier: str) -> _Got:
        started = time.perf_counter()
        entry = self._store.get(EntryKey(self._namespace, identifier))
        return _Got(entry, time.perf_counter() - started)

    def _finish(self, identifier: str, fetch: _Fetch, future: Future[_Got]) -> State:
        try:
            entry, seconds = future.result()
        except (StoreError, OSError, ValueError) as error:
            del self._fetches[identifier]
            self.counts.add(errors=1)
            self._breaker.failed(error)
            return State.MISSING
        self._breaker.succeeded()
        self.counts.add(seconds=seconds)
        if entry is None and fetch.looks is not None and self._clock() < fetch.deadline_s:
            # No thread waits for what may never come: others are to be fetched meanwhile.
            fetch.future = None
            fetch.again_s = self._clock() + RETRY_S[min(fetch.looks, len(RETRY_S) - 1)]
            fetch.looks += 1
            return State.PENDING
        del self._fetches[identifier]
        if entry is None:
            self.counts.add(misses=1)
            return State.MISSING
        self.counts.add(hits=1, bytes=entry.data.nbytes)
        self._held[identifier] = entry
        self._held_bytes += entry.data.nbytes
        # The one just fetched is about to be used: it stays, if need be alone.
        self._trim(keep=identifier)
        return State.READY

    def _give_up(self, identifier: str, fetch: _Fetch) -> State:
        del self._fetches[identifier]
        if fetch.future is None:
            self.counts.add(misses=1)  # the store did answer: it is not there
        else:
            fetch.future.cancel()
            self.counts.add(timeouts=1)
            self._breaker.failed("no answer in time")
        return State.MISSING

    def _trim(self, keep: str | None = None) -> None:
        for identifier in list(self._held):
            if self._held_bytes <= self._keep_bytes:
                return
            if identifier != keep and identifier not in self._pins:
                self._held_bytes -= self._held.pop(identifier).data.nbytes
