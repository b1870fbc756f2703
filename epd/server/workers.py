"""First process of several that serve one address: it starts the workers.

The first process opens the listening sockets and serves no requests. Each worker has its own
listening socket on the same port (`SO_REUSEPORT`): with one shared socket, the first worker to wake
would accept all waiting connections. The first process keeps all sockets open, so that the
connections that wait at a worker that dies are served by its replacement.
"""

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import structlog

from epd.aio import Background
from epd.config import ProxyConfig
from epd.edge.listening import BACKLOG, binding_errors, listening_at
from epd.server.orders import (
    CLEANUP_S,
    CUT_S,
    DRAIN,
    GRACE_S,
    RELOAD,
    Orders,
    first_of,
    listening_url,
    orders_by_signal,
    topology_name,
)
from epd.server.reload import LastGood
from epd.server.worker import (
    BEAT_S,
    Seat,
    Sockets,
    WorkerMain,
    WorkerProcess,
    WorkerProcesses,
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

Address = tuple[Any, ...]
"""Address for the socket functions: host, port, and for IPv6 flow and scope."""


class WorkersFailed(Exception):
    """Error: a worker died `MAX_DEATHS` times in a row soon after its start."""


async def supervise(config: ProxyConfig, worker_main: WorkerMain) -> None:
    """Keep the workers running until SIGTERM or SIGINT, as `server.serve` does for one process.

    Args:
        config: configuration; SIGHUP reloads its files, in the workers too.
        worker_main: coroutine that each worker runs.

    Raises:
        CannotListen: the address cannot be bound.
        OSError: memory or descriptors are exhausted.
        WorkersFailed: a worker keeps dying soon after its start.
    """
    log = structlog.get_logger("epd")
    orders, workers = orders_by_signal(config), WorkerProcesses(worker_main)
    with shared_state(config) as shared:
        with _listening(config) as groups, closing(LastGood(config)) as good:
            # This process has no metrics: its failures appear only in its log.
            background = Background(lambda *_: None)
            reload = partial(_reload, orders, good)
            reloading = asyncio.create_task(background.keep_running("reload", reload))
            for listener in groups[0]:
                log.info(
                    "listening",
                    url=listening_url(config, listener.getsockname()),
                    topology=topology_name(config),
                    workers=config.workers,
                )
            keepers = [
                asyncio.create_task(_keep(Seat(number, sockets, shared), good, orders, workers))
                for number, sockets in enumerate(groups, start=1)
            ]
            await orders.drain.wait()
            log.info("draining", cause=orders.cause)
            await orders.close.wait()
            log.info("stopping")
            reloading.cancel()
        # The sockets are closed here too: the kernel accepts no connection that no worker serves.
        ends = await asyncio.gather(*keepers, return_exceptions=True)
    for failure in filter(None, ends):
        raise failure


async def _reload(orders: Orders, good: LastGood) -> None:
    while True:
        await orders.reload.wait()
        orders.reload.clear()
        good.reload_files()


async def _keep(seat: Seat, good: LastGood, orders: Orders, workers: WorkerProcesses) -> None:
    """Run a worker, and replace it when it dies, until the order to close."""
    clock = asyncio.get_running_loop().time
    deaths = 0
    try:
        while not orders.close.is_set():
            started = clock()
            end = await _run(seat, good, orders, workers)
            if orders.close.is_set():
                return
            deaths = deaths + 1 if clock() - started < STEADY_S else 1
            number, delay_s = seat.number, RESTART_S * 2 ** (deaths - 1)
            if deaths == MAX_DEATHS:
                raise WorkersFailed(f"worker {number} died {deaths} times in a row, last of {end}")
            log = structlog.get_logger("epd")
            log.error("worker died", worker=number, of=end, restart_in_s=delay_s)
            await first_of(orders.close.wait(), asyncio.sleep(delay_s))
    finally:
        orders.stop()


async def _run(seat: Seat, good: LastGood, orders: Orders, workers: WorkerProcesses) -> str:
    """Run one worker to its end, and return the cause of its end."""
    reloaded = good.reloaded  # a reload during the start must be passed on after it
    try:
        process = workers.fork_worker(seat, good)
    except OSError as error:  # processes or memory are exhausted
        return str(error)
    killing = asyncio.create_task(_kill_if_hung(seat, process))
    with closing(await process.open_pipe()) as pipe:
        await first_of(process.wait(), orders.close.wait(), _forward(orders, good, reloaded, pipe))
    limit_s = good.config.drain_timeout_s + CUT_S + CLEANUP_S + GRACE_S
    await first_of(process.wait(), orders.now.wait(), asyncio.sleep(limit_s))
    process.send_signal(signal.SIGUSR1)
    await first_of(process.wait(), asyncio.sleep(GRACE_S))
    process.send_signal(signal.SIGKILL)
    code = await process.wait()
    killing.cancel()
    seat.bury_pages()
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def _kill_if_hung(seat: Seat, process: WorkerProcess) -> None:
    beats, missing = seat.heartbeats(), 0
    while missing < HUNG_BEATS:
        await asyncio.sleep(BEAT_S)
        missing = missing + 1 if seat.heartbeats() == beats else 0
        beats = seat.heartbeats()
    log = structlog.get_logger("epd")
    log.error("worker hangs: killing it", worker=seat.number, without_heartbeat_s=missing * BEAT_S)
    process.send_signal(signal.SIGKILL)


async def _forward(
    orders: Orders, good: LastGood, reloaded: asyncio.Event, pipe: asyncio.WriteTransport
) -> None:
    async def drain() -> None:
        await orders.drain.wait()
        pipe.write(DRAIN + b"\n")

    async def reload() -> None:
        turn = reloaded
        while True:
            await turn.wait()
            turn = good.reloaded
            pipe.write(RELOAD + b"\n")

    await asyncio.gather(drain(), reload())


@contextmanager
def _listening(config: ProxyConfig) -> Iterator[list[Sockets]]:
    """Open sockets on one port: for each worker, one per address of the host.

    All workers share one Unix socket: Unix sockets have no `SO_REUSEPORT`.

    Raises:
        CannotListen: the address cannot be bound.
    """
    with ExitStack() as stack:
        with binding_errors(config):
            if config.uds is None:
                groups = _bound_to_one_port(config, stack)
            else:
                shared = stack.enter_context(listening_at(config.uds))
                groups = [(shared,)] * config.workers
        yield groups


def _bound_to_one_port(config: ProxyConfig, stack: ExitStack) -> list[Sockets]:
    port, by_address = config.port, list[Sockets]()
    for family, (host, _, *scope) in _addresses(config.host):
        # The first socket is bound without SO_REUSEPORT: bind fails if another process listens.
        first = stack.enter_context(_bound(family, (host, port, *scope)))
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound = first.getsockname()
        port = bound[1]
        others = [
            stack.enter_context(_bound(family, bound, shared=True))
            for _ in range(config.workers - 1)
        ]
        by_address.append((first, *others))
    for listener in chain(*by_address):
        listener.listen(BACKLOG)
    return list(zip(*by_address, strict=True))


def _addresses(host: str) -> list[tuple[int, Address]]:
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, *_, address in found))


def _bound(family: int, address: Address, *, shared: bool = False) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        if family == socket.AF_INET6:  # 0.0.0.0 has a socket of its own
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
    except BaseException:
        opened.close()
        raise
    return opened
