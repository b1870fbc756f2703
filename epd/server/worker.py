"""Worker: one of several processes that serve one address. The first process starts it.

Its standard input is a pipe from the first process, which sends the configuration and then orders.
The worker stops when the pipe ends, so it also stops if the first process crashes.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import structlog
import uvloop

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.live import LiveConfig
from epd.edge.listening import Site
from epd.edge.tls import server_context
from epd.observe import logs
from epd.observe.metrics import MetricsObserver
from epd.observe.shared_page import SharedPage
from epd.observe.worker_metrics import WorkerMetrics
from epd.server.assembly import METRICS, POLICIES
from epd.server.last_good import read_from
from epd.server.serve import Orders, running
from epd.server.slots import BACKGROUND
from epd.server.ui import BOARD
from epd.ui.board import Board

DRAIN, RELOAD = b"drain", b"reload "
"""Prefixes of the orders that a worker reads from its pipe, one per line."""
READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Inherited:
    """Descriptors that a worker inherits from the first process.

    Attributes:
        number: number of the worker, from 1.
        sockets: sockets to listen on.
        files: copies of the files that a reload reads, by the names of their fields.
        pages: shared pages with the metrics of each worker.
        recents: shared pages with the recent events of each worker.
        registrations: URL of the shared store of registrations; None without one.
        policies: shared page with the policies that were set.
    """

    number: int
    sockets: Sequence[int]
    files: Mapping[str, int]
    pages: Sequence[int]
    recents: Sequence[int]
    registrations: str | None
    policies: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        files = self.files.values()
        return (*self.sockets, *files, *self.pages, *self.recents, self.policies)


async def work(config: ProxyConfig, inherited: Inherited) -> None:
    """Serve on inherited sockets until standard input ends.

    Files are read from their copies at the start, and from their paths at each reload.

    A worker ignores the signals to stop; the first process handles them and sends orders to the
    workers. A service manager may send the signal to every process, and the connections of a worker
    that stopped alone would wait. SIGUSR1 ends a worker at once.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    store = {"registration_store": inherited.registrations}
    first = read_from(config, inherited.files).model_copy(update=store)
    pipe = Pipe()
    orders, tls = pipe.orders, server_context(first)
    async with running(LiveConfig(first), orders, tls, pipe.configured, config) as runner:
        metrics = _shared(runner.app[METRICS], inherited)
        board = _shared_board(runner.app[BOARD], inherited)
        runner.app[POLICIES].share(SharedPage(inherited.policies))
        background = runner.app[BACKGROUND]
        writing = [
            asyncio.create_task(background.keep(page, one.keep_writing))
            for page, one in (("metrics_page", metrics), ("ui_page", board))
        ]
        for descriptor in inherited.sockets:
            await Site(runner, tls, background, sock=socket.socket(fileno=descriptor)).start()
        structlog.get_logger("epd").info("serving", pid=os.getpid())
        await orders.close.wait()
    for task in writing:
        task.cancel()
    metrics.write()  # the last requests have ended just now


def _shared(metrics: MetricsObserver, inherited: Inherited) -> WorkerMetrics:
    pages = [SharedPage(descriptor) for descriptor in inherited.pages]
    metrics.shown = shared = WorkerMetrics(metrics.shown, pages, inherited.number - 1)
    return shared


def _shared_board(board: Board, inherited: Inherited) -> Board:
    board.share([SharedPage(one) for one in inherited.recents], inherited.number - 1)
    return board


class Pipe:
    """Pipe from the first process on standard input.

    Attributes:
        orders: orders that have arrived.
    """

    def __init__(self) -> None:
        self.orders = Orders()
        self._rest = b""
        self._said: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGUSR1, self._end)
        self._loop.add_reader(sys.stdin.fileno(), self._read)

    def configured(self) -> ProxyConfig:
        """Return the configuration of the latest order to reload.

        Raises:
            ConfigInvalid: the first process found it invalid.
        """
        if "refused" in self._said:
            raise ConfigInvalid(self._said["refused"])
        return ProxyConfig.model_validate(self._said["config"])

    def _read(self) -> None:
        said = os.read(sys.stdin.fileno(), READ_BYTES)
        if not said:
            self._loop.remove_reader(sys.stdin.fileno())
            self.orders.stop()
        *lines, self._rest = (self._rest + said).split(b"\n")
        for line in lines:
            if line == DRAIN:
                self.orders.drain.set()
            elif line.startswith(RELOAD):
                self._said = orjson.loads(line.removeprefix(RELOAD))
                self.orders.reload.set()

    def _end(self) -> None:
        self.orders.now.set()
        self.orders.stop()


def main() -> None:
    """Run the worker that standard input describes."""
    # Unbuffered: the bytes after the first line are orders, which `Pipe` reads.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        described = orjson.loads(pipe.readline())
    config = ProxyConfig.model_validate(described["config"])
    inherited = Inherited(**described["inherited"])
    logs.configure(config.log_format, config.log_level, worker=inherited.number)
    uvloop.run(work(config, inherited))


if __name__ == "__main__":
    main()
