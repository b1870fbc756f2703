"""Protection of a process against a store that hangs or fails: daemon threads and circuit breaker.

A process does not wait for daemon threads at exit. An open breaker makes callers skip their calls
for a while after repeated failures.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

logger = logging.getLogger("vllm.ec_store")

FAILURES = 3
"""Consecutive failures that open a breaker."""

OPEN_S = 5.0
"""Seconds for which a breaker stays open."""

T = TypeVar("T")

Job = Callable[[], object]


class DaemonPool:
    """Pool of daemon threads, each started when it is needed.

    `concurrent.futures.ThreadPoolExecutor` differs in one respect: the interpreter waits for its
    threads before it exits. With one call that never returns, the process could not be stopped.

    Attributes:
        closed: whether no more calls are started.
    """

    def __init__(self, threads: int, name: str) -> None:
        """Create a pool without threads; at most `threads` calls run at once, and others wait."""
        self._most = threads
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Job, Job] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self.closed = False
        self._refused = self._warned = False

    @property
    def capacity(self) -> int:
        """Return how many calls can run at once: fewer while no thread can be started."""
        return max(1, self._threads) if self._refused else self._most

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call and return its future.

        The future is cancelled when the pool is closed before the call starts, and at once if no
        thread runs and none can be started.
        """
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the future raises it
                future.set_exception(error)

        self.queue_job(job, future.cancel)
        return future

    def queue_job(self, job: Job, dropped: Job) -> None:
        """Queue a job, which must not raise.

        Call `dropped` instead if the pool is closed, or if no thread runs and none can be started:
        the job would wait without end.
        """
        with self._lock:
            if not self.closed:
                self._jobs.put((job, dropped))
                if self._wake():
                    return
                self._jobs.get_nowait()  # it is the only one: earlier ones were dropped too
        dropped()

    def _wake(self) -> bool:
        """Start a thread for one more job, if none is idle and the limit allows one.

        Return False if no thread will take the job.
        """
        if self._idle:
            self._idle -= 1
        elif self._threads < self._most:
            name = f"{self._name}-{self._threads + 1}"
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
            except RuntimeError as error:  # the interpreter is exiting, or a limit is reached
                self._refused = True
                if self._threads == 0 and not self._warned:
                    self._warned = True
                    logger.warning(
                        "thread %s cannot be started, and its work is skipped: %s. Raise the limit "
                        "of processes (`ulimit -u`, or the container's `pids.max`).",
                        name,
                        error,
                    )
                return self._threads > 0
            self._threads += 1
            self._refused = False
        return True

    def close(self) -> None:
        """Start no more calls; running ones end by themselves."""
        with self._lock:
            self.closed = True
            for _ in range(self._threads):
                self._jobs.put(None)

    def _work(self) -> None:
        while (jobs := self._jobs.get()) is not None:
            job, dropped = jobs
            (dropped if self.closed else job)()
            # Dropped before the wait for the next job: these refer to the call's arguments.
            del job, dropped, jobs
            with self._lock:
                self._idle += 1


@dataclass(eq=False)
class Breaker:
    """Circuit breaker that opens after `FAILURES` consecutive failures and closes after `open_s`.

    The first result after that decides: a single failure opens it again. Each time it opens, `warn`
    gets a message about `name`. `clock` is monotonic, in seconds.
    """

    name: str
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    warn: Callable[[str], object] = logger.warning
    open_s: float = OPEN_S
    _failures: int = field(default=0, init=False)
    _until_s: float = field(default=0.0, init=False)

    @property
    def open(self) -> bool:
        """Return whether calls are to be skipped now."""
        return self.clock() < self._until_s

    def succeeded(self) -> None:
        self._failures = 0

    def record_failure(self, reason: object) -> None:
        self._failures += 1
        if self._failures >= FAILURES and not self.open:
            self._until_s = self.clock() + self.open_s
            self.warn(f"{self.name} keeps failing, skipping it for {self.open_s:g} s: {reason}")
