"""Entries on their way from a store into this process's memory, without anybody waiting."""

import enum
import functools
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from ec_store.base import Store
from ec_store.breaker import Breaker
from ec_store.counts import Counts
from ec_store.entry import Entry
from ec_store.keys import EntryKey, key_or_none
from ec_store.threads import DaemonPool

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
        key: its key.
        future: what a thread finds; None between two looks for an entry that was promised.
        asked_s: when it was first asked for.
        deadline_s: when it counts as missing.
        looks: how many looks for a promised entry have found nothing; None: one is enough.
        again_s: when to look again.
    """

    key: EntryKey
    future: Future[_Got] | None
    asked_s: float
    deadline_s: float
    looks: int | None
    again_s: float = 0.0


class Fetcher:
    """Fetches entries on threads and holds them until they were used.

    `poll`, `drop`, `entry`, `pin` and `unpin` touch no disk and no network: they are for the
    engine's scheduler, which calls them from one thread. What they ask for is fetched by others.

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
        self._pool = DaemonPool(THREADS, "ec-fetch")
        self._fetches: dict[str, _Fetch] = {}
        self._held: OrderedDict[str, Entry] = OrderedDict()
        self._held_bytes = 0
        self._pins: Counter[str] = Counter()
        self._breaker = Breaker("reading from the encoder cache", clock=clock)
        self._answered_s = -math.inf

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
        if promised and fetch.looks is None:
            fetch.looks = 0
            fetch.deadline_s = self._clock() + self._promise_timeout_s
        if fetch.future is not None and fetch.future.done():
            return self._finish(identifier, fetch, fetch.future)
        if self._clock() >= fetch.deadline_s:
            return self._give_up(identifier, fetch)
        if fetch.future is None and self._clock() >= fetch.again_s:
            fetch.future = self._submit(fetch.key)
        return State.PENDING

    def drop(self, identifier: str) -> None:
        """Forget a fetch that nobody will poll again."""
        fetch = self._fetches.pop(identifier, None)
        if fetch is not None and fetch.future is not None:
            fetch.future.cancel()

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
        self._pool.close()

    def _start(self, identifier: str, *, promised: bool) -> State:
        if self._breaker.open and not promised:
            self.counts.add(bypassed=1)
            return State.MISSING
        key = key_or_none(self._namespace, identifier)
        if key is None:
            self.counts.add(misses=1)
            return State.MISSING
        timeout_s = self._promise_timeout_s if promised else self._timeout_s
        now = self._clock()
        looks = 0 if promised else None
        self._fetches[identifier] = _Fetch(key, self._submit(key), now, now + timeout_s, looks)
        return State.PENDING

    def _submit(self, key: EntryKey) -> Future[_Got]:
        return self._pool.submit(functools.partial(self._get, key))

    def _get(self, key: EntryKey) -> _Got:
        started = time.perf_counter()
        entry = self._store.get(key)
        seconds = time.perf_counter() - started
        if seconds < self._timeout_s:
            self._answered_s = self._clock()
        return _Got(entry, seconds)

    def _finish(self, identifier: str, fetch: _Fetch, future: Future[_Got]) -> State:
        try:
            entry, seconds = future.result()
        except Exception as error:  # noqa: BLE001 - whatever a store raises is its failure
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
            # A store that meanwhile answered others in time is well: too much was asked of it.
            if self._answered_s < fetch.asked_s:
                self._breaker.failed("no answer in time")
        return State.MISSING

    def _trim(self, keep: str | None = None) -> None:
        for identifier in list(self._held):
            if self._held_bytes <= self._keep_bytes:
                return
            if identifier != keep and identifier not in self._pins:
                self._held_bytes -= self._held.pop(identifier).data.nbytes
