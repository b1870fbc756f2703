"""Background writing of entries to a store: the engine does not wait."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from ec_store.concurrency import Breaker, DaemonPool
from ec_store.counts import Counts
from ec_store.entry import EntryInfo
from ec_store.errors import EntryTooLarge, StoreError
from ec_store.keys import EntryKey

QUEUE_BYTES = 512 * 1024**2
CLOSE_TIMEOUT_S = 10.0
LEASE_S = 60.0
"""Lease in seconds on an entry that exists already: a consumer will be directed to it."""

logger = logging.getLogger("vllm.ec_store")

Write = Callable[[], bool | None]
"""Function that writes an entry, as `Store.put`; None: it must not be stored."""
Done = Callable[[EntryKey, bool], None]


class LeasingStore(Protocol):
    """Part of a store that tells whether an entry has to be written."""

    def lease(self, keys: Sequence[EntryKey], seconds: float) -> Sequence[EntryInfo | None]:
        """Look entries up and protect them, as `Store.lease`."""


@dataclass(eq=False)
class Writer:
    """Writer of entries from a bounded queue, on one thread, which the first entry starts.

    After repeated failures of the store, and while the thread cannot be started, entries are
    dropped.

    Attributes:
        store: store that the entries are written to.
        counts: gets `saves`, `known`, `drops`, `exceptions`, `save_bytes`; observes `save_seconds`.
        queue_bytes: upper bound of the bytes that wait; above it entries are dropped. One entry may
            always wait, whatever its size.
        asks: whether to ask the store for an entry before it is written; not a host's memory, which
            says so when the write begins.
        done: function called on the thread with each key, and whether its entry is in the store.
        clock: monotonic clock in seconds.
    """

    store: LeasingStore
    _: KW_ONLY
    counts: Counts = field(default_factory=Counts)
    queue_bytes: int = QUEUE_BYTES
    asks: bool = True
    done: Done = lambda _key, _stored: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._breaker = Breaker("writing to the encoder store", clock=self.clock)
        self._pool = DaemonPool(1, "ec-write")
        self._lock = threading.Lock()
        self._waiting: dict[EntryKey, int] = {}
        self._logged: set[type[Exception]] = set()

    @property
    def waiting_bytes(self) -> int:
        """Return the bytes of the entries that wait or are being written."""
        return sum(self._waiting.values())

    def submit(self, key: EntryKey, size_bytes: int, write: Write) -> bool:
        """Queue an entry for writing, unless the store has one of its key.

        It holds `size_bytes` of memory until it is written. `write` runs on the thread. An entry
        that must not be stored counts as dropped.

        Returns:
            False if the entry is dropped and counted: the queue is full, the store keeps failing,
            or there is no thread.
        """
        with self._lock:
            if key in self._waiting:
                return True
            waiting_bytes = self.waiting_bytes
            full = waiting_bytes > 0 and waiting_bytes + size_bytes > self.queue_bytes
            if full or self._breaker.open:
                self.counts.add(drops=1)
                return False
            self._waiting[key] = size_bytes
        dropped: list[EntryKey] = []

        def drop() -> None:
            """Count an entry that no thread will write: at once, or when the pool is closed."""
            dropped.append(key)
            self.counts.add(drops=1)
            with self._lock:
                del self._waiting[key]

        self._pool.queue_job(lambda: self._process(key, size_bytes, write), drop)
        return not dropped

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the queued entries, for at most `timeout_s` seconds, and drop the others."""
        with suppress(TimeoutError, CancelledError):  # cancelled: there is no thread
            self._pool.submit(lambda: None).result(timeout_s)
        self._pool.close()

    def _process(self, key: EntryKey, size_bytes: int, write: Write) -> None:
        stored = self._written(key, size_bytes, write)
        with self._lock:
            del self._waiting[key]
        try:
            self.done(key, stored)
        except Exception as error:  # noqa: BLE001 - as in `_written`
            self._count_exception(error)

    def _written(self, key: EntryKey, size_bytes: int, write: Write) -> bool:
        started_s = self.clock()
        try:
            stored = self._write(key, size_bytes, write, started_s)
        except EntryTooLarge:
            pass
        except (StoreError, OSError) as error:
            self.counts.observe("save_seconds", self.clock() - started_s)
            self._breaker.record_failure(error)
        except Exception as error:  # noqa: BLE001 - the thread must survive
            self._breaker.record_failure(error)
            self._count_exception(error)
        else:
            self._breaker.succeeded()
            return stored
        self.counts.add(drops=1)
        return False

    def _count_exception(self, error: Exception) -> None:
        """Count an exception, and log the first one of each type."""
        self.counts.add(exceptions=1)
        if type(error) not in self._logged:
            self._logged.add(type(error))
            logger.error(
                "writing to the encoder store failed; the writer continues", exc_info=error
            )

    def _write(self, key: EntryKey, size_bytes: int, write: Write, started_s: float) -> bool:
        if self.asks and self.store.lease([key], LEASE_S)[0] is not None:
            self.counts.add(known=1)
            return True
        written = write()
        if written is None:
            self.counts.add(drops=1)
            return False
        self.counts.observe("save_seconds", self.clock() - started_s)
        if written:
            self.counts.add(saves=1, save_bytes=size_bytes)
        else:
            self.store.lease([key], LEASE_S)
            self.counts.add(known=1)
        return True
