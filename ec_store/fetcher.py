"""Entries on their way from a store into this process's memory, without anybody waiting."""

import enum
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ec_store.base import Store
from ec_store.entry import Entry
from ec_store.errors import StoreError
from ec_store.keys import EntryKey

THREADS = 4
RETRY_S = (0.002, 0.005, 0.01, 0.02, 0.05)
"""Waits between two looks for an entry that was promised; the last one goes on."""

BREAKER_FAILURES = 3
BREAKER_OPEN_S = 5.0


class State(enum.Enum):
    """How far a fetch is."""

    PENDING = "pending"
    READY = "ready"
    MISSING = "missing"


@dataclass(slots=True)
class _Fetch:
    future: Future[Entry | None]
    deadline_s: float
    cancelled: threading.Event


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
        timeout_s: float = 1.0,
        promise_timeout_s: float = 5.0,
        keep_bytes: int = 256 * 1024**2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            store: where entries come from.
            namespace: the namespace of all of them.
            timeout_s: after it an entry counts as missing.
            promise_timeout_s: the same for an entry that an encode instance said it writes.
            keep_bytes: host memory for entries that nobody has pinned.
            clock: monotonic.
        """
        self.counts: Counter[str] = Counter()
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
        self._failures = 0
        self._bypass_until_s = 0.0

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
        if fetch.future.done():
            del self._fetches[identifier]
            return self._finish(identifier, fetch.future)
        if self._clock() < fetch.deadline_s:
            return State.PENDING
        del self._fetches[identifier]
        fetch.cancelled.set()
        fetch.future.cancel()
        self.counts["timeouts"] += 1
        self._failed()
        return State.MISSING

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
        for fetch in self._fetches.values():
            fetch.cancelled.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, identifier: str, *, promised: bool) -> State:
        now = self._clock()
        if now < self._bypass_until_s and not promised:
            self.counts["bypassed"] += 1
            return State.MISSING
        timeout_s = self._promise_timeout_s if promised else self._timeout_s
        cancelled = threading.Event()
        future = self._pool.submit(self._get, identifier, cancelled, promised=promised)
        self._fetches[identifier] = _Fetch(future, now + timeout_s, cancelled)
        return State.PENDING

    def _get(self, identifier: str, cancelled: threading.Event, *, promised: bool) -> Entry | None:
        key = EntryKey(self._namespace, identifier)
        started = time.perf_counter()
        entry = self._store.get(key)
        waits = iter(RETRY_S)
        wait_s = RETRY_S[-1]
        while entry is None and promised and not cancelled.wait(next(waits, wait_s)):
            if self._store.lookup([key])[0] is not None:
                entry = self._store.get(key)
        self.counts["seconds"] += time.perf_counter() - started  # type: ignore[assignment]
        return entry

    def _finish(self, identifier: str, future: Future[Entry | None]) -> State:
        try:
            entry = future.result()
        except (StoreError, OSError, ValueError):
            self.counts["errors"] += 1
            self._failed()
            return State.MISSING
        self._failures = 0
        if entry is None:
            self.counts["misses"] += 1
            return State.MISSING
        self.counts["hits"] += 1
        self.counts["bytes"] += entry.data.nbytes
        self._held[identifier] = entry
        self._held_bytes += entry.data.nbytes
        # The one just fetched is about to be used: it stays, if need be alone.
        self._trim(keep=identifier)
        return State.READY

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= BREAKER_FAILURES:
            self._bypass_until_s = self._clock() + BREAKER_OPEN_S

    def _trim(self, keep: str | None = None) -> None:
        for identifier in list(self._held):
            if self._held_bytes <= self._keep_bytes:
                return
            if identifier != keep and identifier not in self._pins:
                self._held_bytes -= self._held.pop(identifier).data.nbytes
