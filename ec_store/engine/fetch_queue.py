"""Queue of fetches. No I/O."""

import enum
import heapq
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ec_store.engine.entry_memory import buffer_bytes
from ec_store.entry import HeldEntry
from ec_store.keys import EntryKey


class Want(NamedTuple):
    """Parameters of one fetch.

    Attributes:
        size_bytes: expected size of the tensor. The store is not asked for it, which would cost a
            round trip for each entry: `accept` knows the only valid shape, and so the only valid
            size.
        accept: check of the entry, called on the thread that fetched it. A rejected entry counts as
            missing, and its memory is released at once.
        asked_s: time when the request first asked for the entry, by the fetcher's clock; now if
            None.
        rank: priority, lowest first; fetches of equal rank run in the order of their age.
        promised: whether an encode instance has announced that it writes the entry. A promised
            entry is looked up repeatedly.
    """

    size_bytes: int
    accept: Callable[[HeldEntry], bool] = lambda _: True
    asked_s: float | None = None
    rank: int = 0
    promised: bool = False


class Phase(enum.Enum):
    """State of a fetch, as its thread sees it."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    RESTING = enum.auto()
    """Waiting between two lookups of a promised entry."""
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class Fetch:
    """Entry that is being fetched.

    Attributes:
        taken_s: time when a thread took it last.
        first_s: time when a thread took it first.
        ended_s: time when the thread had a result.
        looks: number of lookups that found nothing.
        overdue: whether the thread has missed the deadline; the fetch counts as missing then.
        dropped: whether the store was not asked, because no thread could be started.
        entry, refused, error: result of the thread.
    """

    identifier: str
    key: EntryKey
    want: Want
    promised: bool
    asked_s: float
    phase: Phase = Phase.ENDED
    taken_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    looks: int = 0
    overdue: bool = False
    dropped: bool = False
    entry: HeldEntry | None = None
    refused: bool = False
    error: Exception | None = None


@dataclass(slots=True)
class FetchQueue:
    """Fetches that wait for a thread, by rank and then by due time. Thread-safe.

    Attributes:
        running: fetches on a thread, and ended ones until `end_fetch` is called.
        depth: number of waiting fetches.
        waiting_bytes: memory reserved for the waiting fetches.
    """

    running: set[Fetch] = field(default_factory=set)
    depth: int = 0
    waiting_bytes: int = 0
    _heap: list[tuple[int, float, int, Fetch]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, fetch: Fetch, due_s: float) -> None:
        """Queue a fetch behind those of a lower rank, and those of its rank that are due earlier.

        A thread should take it at `due_s`, by the fetcher's clock.
        """
        with self._lock:
            fetch.phase = Phase.QUEUED
            self._count(fetch, 1)
            heapq.heappush(self._heap, (fetch.want.rank, due_s, next(self._numbers), fetch))

    def take_fetch(self, clock: Callable[[], float]) -> Fetch | None:
        """Take the next fetch and mark it as running; None if no fetch waits."""
        with self._lock:
            while self._heap:
                fetch = heapq.heappop(self._heap)[-1]
                if fetch.phase is Phase.QUEUED:
                    self._count(fetch, -1)
                    fetch.phase = Phase.RUNNING
                    fetch.taken_s = clock()
                    if not fetch.looks:
                        fetch.first_s = fetch.taken_s
                    self.running.add(fetch)
                    return fetch
        return None

    def cancel(self, fetch: Fetch) -> bool:
        """End a fetch; False if a thread is running it."""
        with self._lock:
            if fetch.phase is Phase.RUNNING:
                return False
            if fetch.phase is Phase.QUEUED:
                self._count(fetch, -1)
            fetch.phase = Phase.ENDED
        return True

    def end_fetch(self, fetch: Fetch) -> None:
        """End a running fetch, after its result has been read."""
        with self._lock:
            self.running.discard(fetch)
            fetch.phase = Phase.ENDED

    def late_fetches(self, is_late: Callable[[Fetch], bool]) -> list[Fetch]:
        with self._lock:
            return [fetch for fetch in self.running if is_late(fetch)]

    def _count(self, fetch: Fetch, number: int) -> None:
        self.depth += number
        self.waiting_bytes += number * buffer_bytes(fetch.want.size_bytes)
