"""Threads that a process can leave behind: a store may hang for as long as it likes."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")

Job = Callable[[], None]


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
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a call made; its future is cancelled where the pool is closed."""
        future: Future[T] = Future()

        def job() -> None:
            if self._closed or not future.set_running_or_notify_cancel():
                future.cancel()
                return
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
                future.set_exception(error)

        if not self._begin(job):
            future.cancel()
        return future

    def awaitable(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """The same for the running event loop, without the locks of a future for threads."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(settle: Callable[[], object]) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(lambda: future.done() or settle())

        def job() -> None:
            if self._closed or future.cancelled():
                tell(future.cancel)
                return
            try:
                result = call()
            except BaseException as failure:  # noqa: BLE001 - whoever waits for it is told
                tell(partial(future.set_exception, failure))
            else:
                tell(partial(future.set_result, result))

        if not self._begin(job):
            future.cancel()
        return future

    def _begin(self, job: Job) -> bool:
        """Have a job done by a thread; False where the pool is closed."""
        with self._lock:
            if self._closed:
                return False
            self._jobs.put(job)
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
        return True

    def close(self) -> None:
        """Make no further call; those that run are left to end by themselves."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # Not kept while this waits for the next one.
            del job
            with self._lock:
                self._idle += 1
