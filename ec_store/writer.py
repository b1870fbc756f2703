"""Entries on their way into a store, without the engine waiting."""

import logging
import queue
import threading
import time
from collections.abc import Callable

from ec_store.base import Store
from ec_store.breaker import Breaker
from ec_store.counts import Counts
from ec_store.entry import Entry
from ec_store.errors import EntryTooLarge, StoreError
from ec_store.keys import EntryKey

QUEUE_BYTES = 512 * 1024**2
CLOSE_TIMEOUT_S = 10.0
LEASE_S = 60.0
"""How long an entry that was there already is safe from eviction: a consumer is told of it."""

logger = logging.getLogger("vllm.ec_store")

Make = Callable[[], Entry | None]
Done = Callable[[EntryKey, bool], None]


class Writer:
    """Writes entries on a thread of its own, from a bounded queue.

    A store that keeps failing is left alone for a while: what comes meanwhile is dropped.
    """

    def __init__(
        self,
        store: Store,
        *,
        counts: Counts | None = None,
        queue_bytes: int = QUEUE_BYTES,
        done: Done = lambda _key, _stored: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread.

        Args:
            store: where entries go.
            counts: gets `saves`, `known`, `drops`, `exceptions`, `save_bytes`; observes
                `save_seconds`.
            queue_bytes: how much may wait; above it entries are dropped. One entry may always
                wait, whatever its size.
            done: is told on the thread what became of each entry: whether it is in the store.
            clock: monotonic.
        """
        self.counts = counts or Counts()
        self._store = store
        self._queue_bytes = queue_bytes
        self._done = done
        self._clock = clock
        self._breaker = Breaker("writing to the encoder cache", clock=clock)
        self._queue: queue.SimpleQueue[tuple[EntryKey, Make] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[EntryKey, int] = {}
        self._logged: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._run, name="ec-write", daemon=True)
        self._thread.start()

    def submit(self, key: EntryKey, size_bytes: int, make: Make) -> bool:
        """Have an entry written, unless there is one of its key.

        Args:
            key: its key.
            size_bytes: what it holds until it is written.
            make: makes it, on the thread, if it is needed. An entry that must not be stored is
                None, and counts as dropped.

        Returns:
            False where it is dropped, and counted: too much waits, or the store keeps failing.
        """
        with self._lock:
            if key in self._waiting:
                return True
            waiting_bytes = sum(self._waiting.values())
            full = waiting_bytes > 0 and waiting_bytes + size_bytes > self._queue_bytes
            if full or self._breaker.open:
                self.counts.add(drops=1)
                return False
            self._waiting[key] = size_bytes
        self._queue.put((key, make))
        return True

    def close(self) -> None:
        """Write what waits, for a bounded time."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            key, make = job
            stored = self._written(key, make)
            # `make` holds the tensor: not until the next job comes.
            del job, make
            with self._lock:
                del self._waiting[key]
            try:
                self._done(key, stored)
            except Exception as error:  # noqa: BLE001 - as in `_written`
                self._caught(error)

    def _written(self, key: EntryKey, make: Make) -> bool:
        started_s = self._clock()
        try:
            stored = self._write(key, make, started_s)
        except EntryTooLarge:
            self.counts.add(drops=1)
            return False
        except (StoreError, OSError) as error:
            self.counts.observe("save_seconds", self._clock() - started_s)
            self.counts.add(drops=1)
            self._breaker.failed(error)
            return False
        except Exception as error:  # noqa: BLE001 - without the thread nothing is ever written
            self.counts.add(drops=1)
            self._breaker.failed(error)
            self._caught(error)
            return False
        self._breaker.succeeded()
        return stored

    def _caught(self, error: Exception) -> None:
        """Count an exception, and log the first one of its type."""
        self.counts.add(exceptions=1)
        if type(error) not in self._logged:
            self._logged.add(type(error))
            logger.error("writing to the encoder cache failed; it goes on", exc_info=error)

    def _write(self, key: EntryKey, make: Make, started_s: float) -> bool:
        if self._store.lease([key], LEASE_S)[0] is not None:
            self.counts.add(known=1)
            return True
        entry = make()
        if entry is None:
            self.counts.add(drops=1)
            return False
        written = self._store.put(key, entry)
        self.counts.observe("save_seconds", self._clock() - started_s)
        if written:
            self.counts.add(saves=1, save_bytes=entry.data.nbytes)
        else:
            self.counts.add(known=1)
        return True
