"""Fetches that wait for a thread, and those that threads have. No I/O."""

import enum
import heapq
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ec_store.entry import Entry
from ec_store.keys import EntryKey
from ec_store.memory import buffer_bytes


class Want(NamedTuple):
    """How to fetch one entry.

    Attributes:
        size_bytes: of the tensor that is expected. The store is not asked for the size first, which
            would cost a round trip more for each entry: `accept` knows the only shape that is of
            use, and so the only size.
        accept: looks at the entry on the thread that fetched it. What it refuses is missing, and
            leaves that thread's memory at once.
        asked_s: when the request was first asked for, by the fetcher's clock; now if None.
        rank: fetches with a lower rank are taken first, then the oldest ones.
        promised: an encode instance said that it writes the entry: it is looked for repeatedly.
    """

    size_bytes: int
    accept: Callable[[Entry], bool] = lambda _: True
    asked_s: float | None = None
    rank: int = 0
    promised: bool = False


class Phase(enum.Enum):
    """How far a fetch is, seen from its thread."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    RESTING = enum.auto()
    """Between two looks for an entry that was promised."""
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class Fetch:
    """One entry on its way.

    Attributes:
        taken_s: when a thread took it last.
        first_s: when a thread took it first.
        ended_s: when the thread had an answer.
        looks: how many looks have found nothing.
        overdue: the thread has not come back by the deadline, and the fetch counts as missing.
        entry, refused, error: what the thread found.
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
    entry: Entry | None = None
    refused: bool = False
    error: Exception | None = None


@dataclass(slots=True)
class FetchQueue:
    """Fetches that wait for a thread, the lowest rank first, then the earliest due. Thread-safe.

    Attributes:
        running: fetches that a thread has, or whose answer has not been looked at.
        depth: how many wait.
        waiting_bytes: memory reserved for those that wait.
    """

    running: set[Fetch] = field(default_factory=set)
    depth: int = 0
    waiting_bytes: int = 0
    _heap: list[tuple[int, float, int, Fetch]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, fetch: Fetch, due_s: float) -> None:
        """Add a fetch.

        Args:
            fetch: goes behind those of a lower rank, and those of its rank that are due earlier.
            due_s: when it should be taken, by the clock of all others.
        """
        with self._lock:
            fetch.phase = Phase.QUEUED
            self._count(fetch, 1)
            rank = (fetch.want.rank, due_s, next(self._numbers))
            heapq.heappush(self._heap, (*rank, fetch))

    def take(self, clock: Callable[[], float]) -> Fetch | None:
        """Return the next fetch, running; None where all others were cancelled."""
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
        """End a fetch; False where a thread has it."""
        with self._lock:
            if fetch.phase is Phase.RUNNING:
                return False
            if fetch.phase is Phase.QUEUED:
                self._count(fetch, -1)
            fetch.phase = Phase.ENDED
        return True

    def end(self, fetch: Fetch) -> None:
        """Note that a running fetch has been looked at."""
        with self._lock:
            self.running.discard(fetch)
            fetch.phase = Phase.ENDED

    def late(self, is_late: Callable[[Fetch], bool]) -> list[Fetch]:
        """Return running fetches for which `is_late` holds."""
        with self._lock:
            return [fetch for fetch in self.running if is_late(fetch)]

    def _count(self, fetch: Fetch, number: int) -> None:
        self.depth += number
        self.waiting_bytes += number * buffer_bytes(fetch.want.size_bytes)
