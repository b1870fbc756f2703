"""One of several processes that serve one address, as the first one of them starts it.

Its standard input is a pipe from the first process: the configuration comes by it, then orders; and
its end, however the first process ended, tells the worker to stop.
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
"""How orders to a worker begin, by its pipe, a line each."""
READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a worker has from the first process, beside the configuration: descriptors.

    Attributes:
        number: the worker's.
        sockets: that it listens with.
        files: copies of the files that a reload reads anew, by the names of their fields.
        pages: of the metrics of all workers.
        recents: of what they have seen of late.
        registrations: the store of what is known of instances, which they share.
        policies: the page of those that have been set.
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
        """All of them."""
        files = self.files.values()
        return (*self.sockets, *files, *self.pages, *self.recents, self.policies)


async def work(config: ProxyConfig, inherited: Inherited) -> None:
    """Serve on sockets that are open already, until standard input ends.

    Files are read from their copies at the start, and from where they are at each reload.

    Signals to stop are for the first process, which tells the workers: a service manager may send
    one to every process, and a worker that stopped alone would leave its connections waiting.
    SIGUSR1 ends it at once.
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
    """What the first process says.

    Attributes:
        orders: to do.
    """

    def __init__(self) -> None:
        """Listen from now on."""
        self.orders = Orders()
        self._rest = b""
        self._said: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGUSR1, self._end)
        self._loop.add_reader(sys.stdin.fileno(), self._read)

    def configured(self) -> ProxyConfig:
        """What it has read of the configuration.

        Raises:
            ConfigInvalid: it could not be used.
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
    # Unbuffered: what follows the line are orders.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        described = orjson.loads(pipe.readline())
    config = ProxyConfig.model_validate(described["config"])
    inherited = Inherited(**described["inherited"])
    logs.configure(config.log_format, config.log_level, worker=inherited.number)
    uvloop.run(work(config, inherited))


if __name__ == "__main__":
    main()
