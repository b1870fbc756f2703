"""Worker: one of several processes that serve one address. The first process starts it.

Its standard input is a pipe from the first process, which sends the configuration and then orders.
The worker stops when the pipe ends, so it also stops if the first process crashes.
"""

import asyncio
import os
import signal
import socket
import sys
from functools import partial

import orjson
import structlog
import uvloop

from epd.config import ProxyConfig
from epd.config.proxy_config import LiveConfig
from epd.edge.listening import Site, server_context
from epd.observe import logs
from epd.observe.metrics import MetricsObserver
from epd.observe.worker_metrics import SharedPage, WorkerMetrics
from epd.server.app_keys import ADMISSION, BACKGROUND
from epd.server.operator_routes import BOARD, METRICS, POLICIES
from epd.server.orders import Inherited, Pipe, mapped_ledger
from epd.server.reload import read_from
from epd.server.serve import run_server


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
    async with run_server(LiveConfig(first), orders, tls, pipe.configured, config) as runner:
        metrics = _shared(runner.app[METRICS], inherited)
        board = runner.app[BOARD]
        board.share_pages(
            [SharedPage(descriptor) for descriptor in inherited.recents], inherited.number - 1
        )
        runner.app[POLICIES].share_page(SharedPage(inherited.policies))
        ledger = mapped_ledger(inherited.tenants, first.workers)
        runner.app[ADMISSION].share_uses(partial(ledger.use_of, inherited.number - 1))
        background = runner.app[BACKGROUND]
        writing = [
            asyncio.create_task(background.keep_running(page, writer.keep_writing))
            for page, writer in (("metrics_page", metrics), ("ui_page", board))
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
