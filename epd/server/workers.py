"""First process of several that serve one address: it starts the workers.

The first process opens the listening sockets and serves no requests. Each worker has its own
listening socket on the same port (`SO_REUSEPORT`): with one shared socket, the first worker to wake
would accept all waiting connections. The first process keeps all sockets open, so that the
connections that wait at a worker that dies are served by its replacement.

Each worker writes its metrics to one shared page and its recent events to another. All workers
read all pages.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import orjson
import structlog

from epd.aio import Background
from epd.config import ProxyConfig
from epd.config.proxy_config import LiveConfig
from epd.discovery.membership import shared_store
from epd.edge.listening import BACKLOG, binding_errors, listening_at
from epd.observe.worker_metrics import SharedPage, keep_counters
from epd.server.orders import (
    CLEANUP_S,
    CUT_S,
    DRAIN,
    RELOAD,
    Inherited,
    Orders,
    first_of,
    listening_url,
    mapped_ledger,
    orders_by_signal,
    topology_name,
)
from epd.server.policies_api import policies_changed
from epd.server.reload import LastGood
from epd.tenants import TenantLedger
from epd.ui.dashboard import clear_page

STEADY_S = 30.0
"""Lifetime of a worker, in seconds and from its start, after which its death is not an early one.
"""
MAX_DEATHS = 5
"""Number of early deaths in a row after which the proxy stops."""
RESTART_S = 0.25
"""Delay before a worker is replaced, in seconds; doubled for each further early death in a row."""
GRACE_S = 2.0
"""Time for a worker to exit after its last order, in seconds."""

LOCKED_S = 0.01
"""Delay before a locked page is tried again, in seconds. A write takes microseconds."""

Sockets = tuple[socket.socket, ...]
Address = tuple[Any, ...]
"""Address for the socket functions: host, port, and for IPv6 flow and scope."""


class WorkersFailed(Exception):
    """Error: a worker died `MAX_DEATHS` times in a row soon after its start."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """Memory and stores that all workers share.

    Attributes:
        pages: pages with the metrics of each worker, in the order of their numbers, from 1.
        recents: pages with the recent events of each worker, in the same order.
        registrations: URL of the store of registrations; None without one.
        policies: page with the policies that were set.
        tenants: memory with the counts of tenants.
        ledger: these counts.
    """

    pages: Sequence[SharedPage]
    recents: Sequence[SharedPage]
    registrations: str | None
    policies: SharedPage
    tenants: SharedPage
    ledger: TenantLedger


@dataclass(frozen=True, slots=True)
class Seat:
    """Number, sockets and shared pages that a worker leaves to its replacement."""

    number: int
    sockets: Sockets
    shared: SharedState

    def bury_pages(self) -> None:
        """Mark the pages of the dead worker, so that the others do not read it as alive."""
        keep_counters(self.shared.pages[self.number - 1])
        clear_page(self.shared.recents[self.number - 1])
        self.shared.ledger.forget_requests(self.number - 1)


async def supervise(live: LiveConfig, read: Callable[[], ProxyConfig]) -> None:
    """Keep the workers running until SIGTERM or SIGINT, as `server.serve` does for one process.

    Args:
        live: configuration in force; SIGHUP reloads its reloadable settings, in the workers too.
        read: function that reads the configuration for a reload.

    Raises:
        CannotListen: the address cannot be bound.
        OSError: memory or descriptors are exhausted.
        WorkersFailed: a worker keeps dying soon after its start.
    """
    config = live.current
    with (
        _pages(config.workers) as pages,
        _pages(config.workers) as recents,
        _pages(2) as (policies, tenants),
        shared_store(config) as registrations,
    ):
        ledger = mapped_ledger(tenants.descriptor, config.workers)
        shared = SharedState(pages, recents, registrations, policies, tenants, ledger)
        await _supervise(live, read, shared)


async def _supervise(
    live: LiveConfig, read: Callable[[], ProxyConfig], shares: SharedState
) -> None:
    log = structlog.get_logger("epd")
    orders, config = orders_by_signal(live), live.current
    with _listening(config) as groups, closing(LastGood(live, read)) as good:
        # This process has no metrics: its failures appear only in its log.
        background = Background(lambda *_: None)
        reload = partial(_reload, orders, good, shares.policies)
        reloading = asyncio.create_task(background.keep_running("reload", reload))
        for listener in groups[0]:
            log.info(
                "listening",
                url=listening_url(config, listener.getsockname()),
                topology=topology_name(config),
                workers=config.workers,
            )
        keepers = [
            asyncio.create_task(_keep(Seat(number, sockets, shares), good, orders))
            for number, sockets in enumerate(groups, start=1)
        ]
        await orders.drain.wait()
        log.info("draining")
        await orders.close.wait()
        log.info("stopping")
        reloading.cancel()
    # The sockets are closed here too, so the kernel accepts no connection that no worker serves.
    ends = await asyncio.gather(*keepers, return_exceptions=True)
    for failure in filter(None, ends):
        raise failure


async def _reload(orders: Orders, good: LastGood, policies: SharedPage) -> None:
    while True:
        await orders.reload.wait()
        orders.reload.clear()
        before = good.config
        good.reload_files()
        if policies_changed(before, good.config):
            await _forget(policies)


async def _forget(policies: SharedPage) -> None:
    """Clear the policies that were set; wait for a worker that is writing the page."""
    while True:
        try:
            with policies.hold_lock():
                return policies.write(b"")
        except BlockingIOError:
            await asyncio.sleep(LOCKED_S)


async def _keep(seat: Seat, good: LastGood, orders: Orders) -> None:
    """Run a worker, and replace it when it dies, until the order to close."""
    clock = asyncio.get_running_loop().time
    deaths = 0
    try:
        while not orders.close.is_set():
            started = clock()
            end = await _run(seat, good, orders)
            if orders.close.is_set():
                return
            deaths = deaths + 1 if clock() - started < STEADY_S else 1
            if deaths == MAX_DEATHS:
                raise WorkersFailed(
                    f"worker {seat.number} died {deaths} times in a row, last of {end}"
                )
            delay_s = RESTART_S * 2 ** (deaths - 1)
            structlog.get_logger("epd").error(
                "worker died", worker=seat.number, of=end, restart_in_s=delay_s
            )
            await first_of(orders.close.wait(), asyncio.sleep(delay_s))
    finally:
        orders.stop()


async def _run(seat: Seat, good: LastGood, orders: Orders) -> str:
    """Run one worker to its end, and return the cause of its end."""
    reloaded = good.reloaded  # a reload during the start must be passed on after it
    try:
        process, pipe = await _start(seat, good.config, good.descriptors)
    except OSError as error:  # processes or memory are exhausted
        return str(error)
    with closing(pipe):
        await first_of(process.wait(), orders.close.wait(), _forward(orders, good, reloaded, pipe))
    limit_s = good.config.drain_timeout_s + CUT_S + CLEANUP_S + GRACE_S
    await first_of(process.wait(), orders.now.wait(), asyncio.sleep(limit_s))
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
    await first_of(process.wait(), asyncio.sleep(GRACE_S))
    with suppress(ProcessLookupError):
        process.kill()
    code = await process.wait()
    seat.bury_pages()
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def _forward(
    orders: Orders, good: LastGood, reloaded: asyncio.Event, pipe: asyncio.StreamWriter
) -> None:
    """Forward the orders of this process to a worker."""

    async def drain() -> None:
        await orders.drain.wait()
        pipe.write(DRAIN + b"\n")

    async def reload() -> None:
        turn = reloaded
        while True:
            await turn.wait()
            turn = good.reloaded
            pipe.write(RELOAD + good.message + b"\n")

    await asyncio.gather(drain(), reload())


async def _start(
    seat: Seat, config: ProxyConfig, files: Mapping[str, int]
) -> tuple[asyncio.subprocess.Process, asyncio.StreamWriter]:
    inherited = Inherited(
        seat.number,
        [listener.fileno() for listener in seat.sockets],
        files,
        [page.descriptor for page in seat.shared.pages],
        [page.descriptor for page in seat.shared.recents],
        seat.shared.registrations,
        seat.shared.policies.descriptor,
        seat.shared.tenants.descriptor,
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "epd.server.worker"),
        stdin=asyncio.subprocess.PIPE,
        pass_fds=inherited.descriptors,
        # The worker imports the same modules as this process, whatever its working directory.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        # A terminal sends SIGINT to a whole group; here only the first process acts on it.
        process_group=0,
    )
    pipe = cast("asyncio.StreamWriter", process.stdin)
    described = {"inherited": inherited, "config": orjson.Fragment(config.to_json())}
    pipe.write(orjson.dumps(described) + b"\n")
    return process, pipe


@contextmanager
def _pages(count: int) -> Iterator[list[SharedPage]]:
    """Create this number of shared pages, and close them at the end of the context.

    Raises:
        OSError: memory or descriptors are exhausted.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(closing(SharedPage.new_page())) for _ in range(count)]


@contextmanager
def _listening(config: ProxyConfig) -> Iterator[list[Sockets]]:
    """Open sockets on one port: for each worker, one per address of the host.

    All workers share one Unix socket: Unix sockets have no `SO_REUSEPORT`.

    Raises:
        CannotListen: the address cannot be bound.
    """
    with ExitStack() as stack:
        groups: list[Sockets]
        with binding_errors(config):
            if config.uds is None:
                groups = _bound_to_one_port(config, stack)
            else:
                groups = [(stack.enter_context(listening_at(config.uds, BACKLOG)),)]
                groups *= config.workers
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
