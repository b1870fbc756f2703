"""Queue of fetches, and host memory of the fetched entries within one budget. No I/O.

`FetchQueue` is thread-safe. `EntryMemory` is used on one thread.
"""

import enum
import heapq
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ec_store.entry import HeldEntry
from ec_store.keys import EntryKey

LARGE_BYTES = 2**20
PAGE_BYTES = 2 * 2**20
"""Unit in bytes of the buffers into which stores read entries of `LARGE_BYTES` or more."""

OVERHEAD_BYTES = 2048
"""Bytes of an entry beside its tensor: its header, and Python's objects."""


def buffer_bytes(size_bytes: int) -> int:
    """Return the memory to reserve for a tensor of `size_bytes` before it is fetched."""
    pages = -(-size_bytes // PAGE_BYTES)
    # Stores choose the buffer by the size of the whole entry, with its header.
    is_small = size_bytes + OVERHEAD_BYTES < LARGE_BYTES
    return OVERHEAD_BYTES + (size_bytes if is_small else pages * PAGE_BYTES)


def entry_bytes(entry: HeldEntry) -> int:
    """Return the memory that an entry takes: the whole buffers that its tensor is in."""
    return OVERHEAD_BYTES + sum(memoryview(part.obj).nbytes for part in entry.parts)


class EntryMemory:
    """Entries in memory, and reservations for those being fetched.

    A claimed entry stays. Other entries are kept while there is room, the most recently used ones.
    Reservations, claimed entries and kept entries together stay within the budget, with one
    exception: see `has_room`.

    Attributes:
        held_bytes: bytes of all entries, claimed or kept.
        pinned_bytes: bytes of claimed entries.
        reserved_bytes: bytes of reservations.
    """

    def __init__(self, limit_bytes: int, *, keeps: bool = True) -> None:
        """Create the memory; without `keeps` only claimed entries stay."""
        self._keeps = keeps
        self.held_bytes = 0
        self.pinned_bytes = 0
        self.reserved_bytes = 0
        self._limit_bytes = limit_bytes
        self._pinned: dict[str, HeldEntry] = {}
        self._kept: OrderedDict[str, HeldEntry] = OrderedDict()
        self._reserved: dict[str, int] = {}
        self._claims: Counter[str] = Counter()

    def entry(self, identifier: str) -> HeldEntry | None:
        return self._pinned.get(identifier) or self._kept.get(identifier)

    def is_claimed(self, identifier: str) -> bool:
        """Return whether an entry, or its reservation, is claimed."""
        return identifier in self._claims

    def has_room(self, wanted: Mapping[str, int]) -> bool:
        """Return whether all entries may be claimed, with these bytes for those not held.

        Kept entries make room. While nothing is claimed, any request is admitted, even above the
        budget: a request larger than the budget would otherwise wait indefinitely.
        """
        needed = sum(self._needed(identifier, size) for identifier, size in wanted.items())
        taken = self.pinned_bytes + self.reserved_bytes
        return not needed or not self._claims or taken + needed <= self._limit_bytes

    def _needed(self, identifier: str, size_bytes: int) -> int:
        if identifier in self._claims or identifier in self._reserved:
            return 0
        kept = self._kept.get(identifier)
        return size_bytes if kept is None else entry_bytes(kept)

    def reserve(self, identifier: str, size_bytes: int) -> None:
        """Reserve memory for an entry to be fetched; kept entries are dropped for it."""
        self._reserved[identifier] = size_bytes
        self.reserved_bytes += size_bytes
        self._trim()

    def hold_entry(self, identifier: str, entry: HeldEntry | None) -> None:
        """End a reservation, and hold its entry unless it is None."""
        self.reserved_bytes -= self._reserved.pop(identifier)
        if entry is not None:
            self.held_bytes += entry_bytes(entry)
            if identifier in self._claims:
                self._pin(identifier, entry)
            else:
                self._kept[identifier] = entry
        self._trim()

    def claim(self, identifier: str) -> None:
        """Hold an entry, or the one being fetched, until `release`."""
        self._claims[identifier] += 1
        if identifier in self._kept:
            self._pin(identifier, self._kept.pop(identifier))

    def release(self, identifier: str) -> None:
        self._claims[identifier] -= 1
        if self._claims[identifier] <= 0:
            self.release_all(identifier)

    def release_all(self, identifier: str) -> None:
        self._claims.pop(identifier, None)
        entry = self._pinned.pop(identifier, None)
        if entry is not None:
            self.pinned_bytes -= entry_bytes(entry)
            self._kept[identifier] = entry
        self._trim()

    def discard(self, identifier: str) -> None:
        entry = self._kept.pop(identifier, None)
        if entry is not None:
            self.held_bytes -= entry_bytes(entry)

    def _pin(self, identifier: str, entry: HeldEntry) -> None:
        self._pinned[identifier] = entry
        self.pinned_bytes += entry_bytes(entry)

    def _trim(self) -> None:
        limit_bytes = self._limit_bytes if self._keeps else 0
        while self._kept and self.held_bytes + self.reserved_bytes > limit_bytes:
            self.discard(next(iter(self._kept)))


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
