"""Entries on their way into a store, without the engine waiting."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

from ec_store.base import Store
from ec_store.entry import Entry
from ec_store.errors import StoreError
from ec_store.keys import EntryKey

QUEUE_LENGTH = 64
CLOSE_TIMEOUT_S = 10.0


class Writer:
    """Writes entries on a thread of its own, from a bounded queue."""

    def __init__(self, store: Store, length: int = QUEUE_LENGTH) -> None:
        """Start the thread.

        Args:
            store: where entries go.
            length: how many may wait; above it they are dropped.
        """
        self.counts: Counter[str] = Counter()
        self._store = store
        self._queue: queue.Queue[tuple[EntryKey, Callable[[], Entry]] | None] = queue.Queue(length)
        self._waiting: set[EntryKey] = set()
        self._thread = threading.Thread(target=self._run, name="ec-write", daemon=True)
        self._thread.start()

    def submit(self, key: EntryKey, make: Callable[[], Entry]) -> bool:
        """Have an entry written, unless there is one of its key.

        Args:
            key: its key.
            make: makes it, on the thread, if it is needed: this is where it leaves the device.

        Returns:
            False where the queue is full: it is dropped, and counted.
        """
        if key in self._waiting:
            return True
        try:
            self._queue.put_nowait((key, make))
        except queue.Full:
            self.counts["drops"] += 1
            return False
        self._waiting.add(key)
        return True

    def close(self) -> None:
        """Write what waits, for a bounded time."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            key, make = job
            try:
                self._write(key, make)
            except (StoreError, OSError, ValueError):
                self.counts["drops"] += 1
            finally:
                self._waiting.discard(key)

    def _write(self, key: EntryKey, make: Callable[[], Entry]) -> None:
        started = time.perf_counter()
        if self._store.lookup([key])[0] is not None:
            self.counts["known"] += 1
            return
        entry = make()
        if self._store.put(key, entry):
            self.counts["saves"] += 1
            self.counts["save_bytes"] += entry.data.nbytes
        else:
            self.counts["known"] += 1
        self.counts["save_seconds"] += time.perf_counter() - started  # type: ignore[assignment]
