"""Threads that a process can leave behind: a store may hang for as long as it likes."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

Job = Callable[[], object]


class DaemonPool:
    """Runs calls on a few threads, each begun when it is needed.

    `concurrent.futures.ThreadPoolExecutor` does the same, but the interpreter waits for its threads
    before it exits: one call that never returns, and the process cannot be stopped.
    """

    def __init__(self, threads: int, name: str) -> None:
        """Start none yet.

        Args:
            threads: how many calls run at once; others wait.
            name: what the threads are called.
        """
        self._most = threads
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Job, Job] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a call made; its future is cancelled where the pool is closed."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
                future.set_exception(error)

        self.begin(job, future.cancel)
        return future

    def begin(self, job: Job, dropped: Job) -> None:
        """Have a job done, which raises nothing; where the pool is closed, `dropped` instead."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._jobs.put((job, dropped))
                self._wake()
        if closed:
            dropped()

    def _wake(self) -> None:
        """Have a thread at hand for one more job, if there may be another one."""
        if self._idle:
            self._idle -= 1
        elif self._threads < self._most:
            self._threads += 1
            name = f"{self._name}-{self._threads}"
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
            except RuntimeError:
                # The interpreter ends, or there are too many: it waits for another thread.
                self._threads -= 1

    def close(self) -> None:
        """Make no further call; those that run are left to end by themselves."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._jobs.put(None)

    def _work(self) -> None:
        while (jobs := self._jobs.get()) is not None:
            job, dropped = jobs
            (dropped if self._closed else job)()
            # Not kept while this waits for the next one.
            del job, dropped, jobs
            with self._lock:
                self._idle += 1
