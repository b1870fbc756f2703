"""First process of several that serve one address: it starts the workers.

The first process opens the listening sockets and serves no requests. Each worker has its own
listening socket on the same port (`SO_REUSEPORT`): with one shared socket, the first worker to wake
would accept all waiting connections. The first process keeps all sockets open, so that the
connections that wait at a worker that dies are served by its replacement.
"""

import asyncio
import signal
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain

import structlog

from epd.aio import Background
from epd.config import ProxyConfig
from epd.edge.files import Files
from epd.edge.listening import BACKLOG, binding_errors, bound_sockets, log_listening
from epd.observe import logs
from epd.workers.orders import (
    CLEANUP_S,
    CUT_S,
    DRAIN,
    GRACE_S,
    RELOAD,
    Orders,
    first_of,
    orders_by_signal,
)
from epd.workers.worker import (
    BEAT_S,
    WorkerMain,
    WorkerProcess,
    WorkerProcesses,
    WorkerSlot,
    shared_state,
)

STEADY_S = 30.0
"""Lifetime of a worker, in seconds from its start, after which its death is not an early one."""
MAX_DEATHS = 5
"""Number of early deaths in a row after which the proxy stops."""
RESTART_S = 0.25
"""Delay before a worker is replaced, in seconds; doubled for each further early death in a row."""
HUNG_BEATS = 30
"""Number of missing heartbeats in a row after which a worker is killed: 30 s. The first process
counts at its own pace, so that a pause of the whole machine kills no worker."""


class WorkersFailed(Exception):
    """Error: a worker died `MAX_DEATHS` times in a row soon after its start."""


async def supervise(
    config: ProxyConfig, worker_main: WorkerMain, hung_beats: int = HUNG_BEATS
) -> None:
    """Keep the workers running until SIGTERM or SIGINT, as `server.serve` does for one process.

    Args:
        config: configuration; SIGHUP reloads its files, in the workers too.
        worker_main: coroutine that each worker runs.
        hung_beats: number of missing heartbeats in a row after which a worker is killed.

    Raises:
        CannotListen: the address cannot be bound.
        OSError: memory or descriptors are exhausted.
        WorkersFailed: a worker keeps dying soon after its start.
    """
    log = structlog.get_logger("epd")
    orders, files = orders_by_signal(config), Files(config)
    workers = WorkerProcesses(worker_main, config, files)
    with shared_state(config) as shared:
        with bound_sockets(config) as groups:
            with binding_errors(config):
                for listener in chain(*groups):
                    listener.listen(BACKLOG)
            # This process has no metrics: its failures appear only in its log.
            background = Background(lambda *_: None)
            reload = partial(_reload, orders, files, workers)
            reloading = asyncio.create_task(background.keep_running("reload", reload))
            for listener in groups[0]:
                log_listening(config, listener.getsockname(), workers=config.workers)
            logs.flush()  # before the lines of the workers
            keepers = [
                asyncio.create_task(
                    Keeper(
                        WorkerSlot(number, sockets, shared), config, orders, workers, hung_beats
                    ).keep()
                )
                for number, sockets in enumerate(groups, start=1)
            ]
            await orders.drain.wait()
            workers.send_order(DRAIN)
            log.info("draining", cause=orders.cause)
            await orders.close.wait()
            log.info("stopping")
            reloading.cancel()
        # The sockets are closed here too: the kernel accepts no connection that no worker serves.
        ends = await asyncio.gather(*keepers, return_exceptions=True)
    for failure in filter(None, ends):
        raise failure


async def _reload(orders: Orders, files: Files, workers: WorkerProcesses) -> None:
    while True:
        await orders.reload.wait()
        orders.reload.clear()
        files.reload(warns=False)  # the workers do the same, and log it
        workers.send_order(RELOAD)


@dataclass(frozen=True, slots=True, eq=False)
class Keeper:
    """Keeps one worker running."""

    slot: WorkerSlot
    config: ProxyConfig
    orders: Orders
    workers: WorkerProcesses
    hung_beats: int

    async def keep(self) -> None:
        """Run the worker, and replace it when it dies, until the order to close.

        Raises:
            WorkersFailed: it died `MAX_DEATHS` times in a row soon after its start.
        """
        clock, closed = asyncio.get_running_loop().time, self.orders.close
        deaths = 0
        try:
            while not closed.is_set():
                started = clock()
                end = await self._run()
                if closed.is_set():
                    return
                deaths = deaths + 1 if clock() - started < STEADY_S else 1
                number, delay_s = self.slot.number, RESTART_S * 2 ** (deaths - 1)
                if deaths == MAX_DEATHS:
                    raise WorkersFailed(
                        f"worker {number} died {deaths} times in a row, last of {end}"
                    )
                log = structlog.get_logger("epd")
                log.error("worker died", worker=number, of=end, restart_in_s=delay_s)
                await first_of(closed.wait(), asyncio.sleep(delay_s))
        finally:
            self.orders.stop()

    async def _run(self) -> str:
        """Run the worker once to its end, and return the cause of its end."""
        orders = self.orders
        try:
            process = self.workers.fork_worker(self.slot)
        except OSError as error:  # processes or memory are exhausted
            return str(error)
        killing = asyncio.create_task(self._kill_if_hung(process))
        with closing(process):
            if orders.drain.is_set():
                process.send_order(DRAIN)
            await first_of(process.wait(), orders.close.wait())
        limit_s = self.config.drain_timeout_s + CUT_S + CLEANUP_S + GRACE_S
        await first_of(process.wait(), orders.now.wait(), asyncio.sleep(limit_s))
        process.send_signal(signal.SIGUSR1)
        await first_of(process.wait(), asyncio.sleep(GRACE_S))
        process.send_signal(signal.SIGKILL)
        code = await process.wait()
        killing.cancel()
        self.slot.bury_pages()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def _kill_if_hung(self, process: WorkerProcess) -> None:
        slot = self.slot
        beats, missing = slot.heartbeats(), 0
        while missing < self.hung_beats:
            await asyncio.sleep(BEAT_S)
            missing = missing + 1 if slot.heartbeats() == beats else 0
            beats = slot.heartbeats()
        structlog.get_logger("epd").error(
            "worker hangs: killing it", worker=slot.number, without_heartbeat_s=missing * BEAT_S
        )
        process.send_signal(signal.SIGKILL)
