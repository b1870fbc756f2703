"""Worker: one of several processes that serve one address, a fork of the first process.

A fork shares the memory of the imported modules and starts without importing them. It runs the same
code as the other workers, even if the installed files have changed since.

A worker has a slot: its number, its sockets, and what all workers share. The slot outlives the
worker: the replacement of a worker that died gets the same one.
"""

import asyncio
import gc
import mmap
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import structlog
import uvloop

from epd.config import ProxyConfig
from epd.discovery.membership import SourcePages
from epd.edge.files import Files
from epd.edge.listening import Sockets
from epd.edge.tenant_use import TenantLedger
from epd.observe import logs
from epd.observe.worker_metrics import keep_counters
from epd.shared_page import SharedPage
from epd.workers.orders import SIGNALS

MAX_STANDARD = 2
"""Largest of the descriptors of standard input, output and error."""

BEAT_S = 1.0
"""Interval of a worker's heartbeat, in seconds."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """Memory that all workers share. A worker writes its own metrics and events.

    Attributes:
        pages: pages with the metrics of each worker, in the order of their numbers, from 1.
        recents: pages with the recent events of each worker, in the same order.
        sources: pages with the registered instances, and with the last answers of other sources.
        ledger: counts of tenants.
        heartbeats: number of heartbeats of each worker, in the same order.
    """

    pages: Sequence[SharedPage]
    recents: Sequence[SharedPage]
    sources: SourcePages
    ledger: TenantLedger
    heartbeats: memoryview


@contextmanager
def shared_state(config: ProxyConfig) -> Iterator[SharedState]:
    """Create what the workers share, and remove it at the end of the context.

    Raises:
        OSError: memory or descriptors are exhausted.
    """
    with ExitStack() as stack:
        pages, recents, sources = (
            [stack.enter_context(closing(SharedPage.new_page())) for _ in range(count)]
            for count in (config.workers, config.workers, len(SourcePages._fields))
        )
        memory = mmap.mmap(-1, TenantLedger.size_bytes(config.workers))  # forked processes share it
        ledger = TenantLedger(memoryview(memory), config.workers)
        heartbeats = memoryview(mmap.mmap(-1, 8 * config.workers)).cast("Q")
        yield SharedState(pages, recents, SourcePages(*sources), ledger, heartbeats)


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """Number, from 1, and sockets of a worker, and what it shares with the others."""

    number: int
    sockets: Sockets
    shared: SharedState

    @property
    def index(self) -> int:
        return self.number - 1

    @property
    def descriptors(self) -> set[int]:
        shared = self.shared
        pages = (*shared.pages, *shared.recents, *shared.sources)
        listeners = (listener.fileno() for listener in self.sockets)
        return {*listeners, *(page.descriptor for page in pages)}

    def heartbeats(self) -> int:
        """Return the number of heartbeats; it grows each `BEAT_S` while the worker is alive."""
        count: int = self.shared.heartbeats[self.index]
        return count

    async def keep_beating(self) -> None:
        """Add a heartbeat every `BEAT_S`. Call it on the worker's event loop."""
        while True:
            self.shared.heartbeats[self.index] += 1
            await asyncio.sleep(BEAT_S)

    def bury_pages(self) -> None:
        """Mark the pages of the dead worker, so that the others do not read it as alive."""
        keep_counters(self.shared.pages[self.index])
        with suppress(OSError):  # the others show its last state for a while
            self.shared.recents[self.index].write(b"")
        self.shared.ledger.forget_requests(self.index)


WorkerMain = Callable[[WorkerSlot, ProxyConfig, Files, int], Coroutine[Any, Any, None]]
"""Coroutine of a worker. Its arguments are the slot, the configuration, the content of its files,
and the descriptor of the pipe from which the worker reads its orders."""


class WorkerProcess:
    """Process of a worker, as the first process sees it."""

    def __init__(self, pid: int, orders: int) -> None:
        """Represent a process that runs. `orders` is the descriptor of the pipe to it."""
        self._pid = pid
        self._orders = orders
        os.set_blocking(orders, False)
        self._ended = asyncio.Event()
        self._status = 0

    def send_order(self, order: bytes) -> None:
        """Write an order to the pipe, unless the worker has ended or hangs."""
        with suppress(OSError):
            os.write(self._orders, order + b"\n")

    def close(self) -> None:
        """Close the pipe: the worker stops."""
        os.close(self._orders)
        self._orders = -1

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit code, or minus the signal's number."""
        await self._ended.wait()
        return os.waitstatus_to_exitcode(self._status)

    def send_signal(self, number: int) -> None:
        if not self._ended.is_set():
            os.kill(self._pid, number)

    def reap_if_ended(self) -> bool:
        """Return whether the process has ended. Its number is then free for another process."""
        pid, self._status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._ended.set()
        return self._ended.is_set()


class WorkerProcesses:
    """Workers that have not ended. All methods are called in the first process."""

    def __init__(self, worker_main: WorkerMain, config: ProxyConfig, files: Files) -> None:
        self._worker_main = worker_main
        self._config = config
        self._files = files
        self._running: list[WorkerProcess] = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def fork_worker(self, slot: WorkerSlot) -> WorkerProcess:
        """Start a worker with the current content of the files.

        Raises:
            OSError: processes, memory or descriptors are exhausted.
        """
        orders, writable = os.pipe()
        try:
            pid = os.fork()
            if not pid:
                self._run_and_exit(slot, orders)
        except OSError:
            os.close(writable)
            raise
        finally:
            os.close(orders)
        process = WorkerProcess(pid, writable)
        self._running.append(process)
        return process

    def _run_and_exit(self, slot: WorkerSlot, orders: int) -> NoReturn:
        status, config = 1, self._config
        try:
            _leave_first_process({*slot.descriptors, orders})
            with suppress(OSError):  # for `top` and `ps`; some sandboxes have no such file
                Path("/proc/self/comm").write_text(f"epd worker {slot.number}")
            logs.configure(config.log_format, config.log_level, worker=slot.number)
            uvloop.run(_beating(slot, self._worker_main(slot, config, self._files, orders)))
            status = 0
        except BaseException:  # noqa: BLE001 - the frames above are those of the first process
            structlog.get_logger("epd").exception("worker failed")
        finally:
            logs.flush()
            os._exit(status)  # `sys.exit` would also run what the first process does at its exit

    def send_order(self, order: bytes) -> None:
        """Send an order to all workers that have not ended."""
        for process in self._running:
            process.send_order(order)

    def _reap(self) -> None:
        self._running = [process for process in self._running if not process.reap_if_ended()]


async def _beating(slot: WorkerSlot, main: Coroutine[Any, Any, None]) -> None:
    beating = asyncio.create_task(slot.keep_beating())
    await main
    beating.cancel()


def _leave_first_process(descriptors: set[int]) -> None:
    """Give up what a new fork has of the first process, except descriptors that are kept."""
    # A terminal sends SIGINT to a whole group; only the first process acts on it.
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)  # it belongs to the event loop of the first process
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Only the first process, which blocks them, acts on these. A service manager may send them to
    # every process, and the connections of a worker that stopped alone would wait.
    for ignored in SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    gc.freeze()  # inherited objects stay: their end would close descriptors that the worker reuses
    # Close all others: a worker must not keep open what belongs to another one.
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - names, not paths
        if descriptor > MAX_STANDARD and descriptor not in descriptors:
            with suppress(OSError):  # `listdir` has closed its own descriptor
                os.close(descriptor)
