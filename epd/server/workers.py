"""Several processes that serve one address, and the one that starts them.

The first process listens and serves nothing. Each worker has a listening socket of its own on the
same port (`SO_REUSEPORT`): on one that all share, the first to wake takes every connection that
waits, and keeps it. The first process holds all of them too, so that connections that wait at a
worker that dies are served by the next one.

Each worker has a page for its metrics and one for what it has seen of late, which all of them
read.
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

from epd.background import Background
from epd.config import ProxyConfig
from epd.config.live import LiveConfig
from epd.discovery.membership import shared_store
from epd.edge.listening import BACKLOG, binding
from epd.edge.unix_socket import listening_at
from epd.observe.shared_page import SharedPage
from epd.observe.worker_metrics import bury
from epd.server.last_good import LastGood
from epd.server.policies import said_otherwise
from epd.server.serve import (
    CLEANUP_S,
    CUT_S,
    Orders,
    first_of,
    orders_by_signal,
    topology,
    url,
)
from epd.server.worker import DRAIN, RELOAD, Inherited
from epd.ui.board import forget

STEADY_S = 30.0
"""A worker that lived so long, its start included, was not born broken."""
MAX_DEATHS = 5
"""So many early deaths in a row end everything."""
RESTART_S = 0.25
"""Before a worker is replaced; doubled with each further early death."""
GRACE_S = 2.0
"""For a worker that was told to end by now."""

LOCKED_S = 0.01
"""Until a page that a worker is writing is tried again: it takes microseconds."""

Sockets = tuple[socket.socket, ...]
Address = tuple[Any, ...]
"""As the socket functions take it: host, port, and for IPv6 flow and scope."""


class WorkersFailed(Exception):
    """A worker died again and again, as soon as it was started."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all workers have in common.

    Attributes:
        pages: of their metrics, in the order of their numbers, which begin at 1.
        recents: the same, of what they have seen of late.
        registrations: the store of what is known of instances; None where there is none.
        policies: the page of those that have been set.
    """

    pages: Sequence[SharedPage]
    recents: Sequence[SharedPage]
    registrations: str | None
    policies: SharedPage


@dataclass(frozen=True, slots=True)
class Seat:
    """What a worker and its replacements have in common."""

    number: int
    sockets: Sockets
    shared: Shared

    def bury(self) -> None:
        """Have nobody take its worker, which has died, for one that lives."""
        bury(self.shared.pages[self.number - 1])
        forget(self.shared.recents[self.number - 1])


async def supervise(live: LiveConfig, read: Callable[[], ProxyConfig]) -> None:
    """Keep the workers running until SIGTERM or SIGINT, as `server.serve` does for one process.

    Args:
        live: what is in force; what may change of it does at SIGHUP, for the workers too.
        read: what is configured then.

    Raises:
        CannotListen: the address cannot be had.
        OSError: there is no memory, or no descriptor.
        WorkersFailed: they do not stay alive.
    """
    config = live.current
    with (
        _pages(config.workers) as pages,
        _pages(config.workers) as recents,
        _pages(1) as (policies,),
        shared_store(config) as registrations,
    ):
        await _supervise(live, read, Shared(pages, recents, registrations, policies))


async def _supervise(live: LiveConfig, read: Callable[[], ProxyConfig], shares: Shared) -> None:
    log = structlog.get_logger("epd")
    orders, config = orders_by_signal(live), live.current
    with _listening(config) as groups, closing(LastGood(live, read)) as good:
        # This process has no metrics of its own: what goes wrong here is in its log alone.
        background = Background(lambda *_: None)
        reload = partial(_reload, orders, good, shares.policies)
        reloading = asyncio.create_task(background.keep("reload", reload))
        for listener in groups[0]:
            log.info(
                "listening",
                url=url(config, listener.getsockname()),
                topology=topology(config),
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
    # Closed here too, the port takes no connection that no worker would serve.
    ends = await asyncio.gather(*keepers, return_exceptions=True)
    for failure in filter(None, ends):
        raise failure


async def _reload(orders: Orders, good: LastGood, policies: SharedPage) -> None:
    while True:
        await orders.reload.wait()
        orders.reload.clear()
        before = good.config
        good.renew()
        if said_otherwise(before, good.config):
            await _forget(policies)


async def _forget(policies: SharedPage) -> None:
    """Have what is configured in force again, whatever a worker may be writing at the moment."""
    while True:
        try:
            with policies.locked():
                return policies.write(b"")
        except BlockingIOError:
            await asyncio.sleep(LOCKED_S)


async def _keep(seat: Seat, good: LastGood, orders: Orders) -> None:
    """Run a worker, and another whenever it dies, until all are to close."""
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
    """Run one worker to its end, and say what it died of."""
    reloaded = good.reloaded  # a reload while it starts comes too late for what it starts with
    try:
        process, pipe = await _start(seat, good.config, good.descriptors)
    except OSError as error:  # no process or no memory to be had at the moment
        return str(error)
    with closing(pipe):
        await first_of(process.wait(), orders.close.wait(), _pass_on(orders, good, reloaded, pipe))
    limit_s = good.config.drain_timeout_s + CUT_S + CLEANUP_S + GRACE_S
    await first_of(process.wait(), orders.now.wait(), asyncio.sleep(limit_s))
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
    await first_of(process.wait(), asyncio.sleep(GRACE_S))
    with suppress(ProcessLookupError):
        process.kill()
    code = await process.wait()
    seat.bury()
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def _pass_on(
    orders: Orders, good: LastGood, reloaded: asyncio.Event, pipe: asyncio.StreamWriter
) -> None:
    """Tell a worker what this process is told."""

    async def drain() -> None:
        await orders.drain.wait()
        pipe.write(DRAIN + b"\n")

    async def reload() -> None:
        turn = reloaded
        while True:
            await turn.wait()
            turn = good.reloaded
            pipe.write(RELOAD + good.said + b"\n")

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
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "epd.server.worker"),
        stdin=asyncio.subprocess.PIPE,
        pass_fds=inherited.descriptors,
        # The modules of this process, wherever it was started.
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
    """Pages for so many workers.

    Raises:
        OSError: there is no memory or no descriptor for them.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(closing(SharedPage.made())) for _ in range(count)]


@contextmanager
def _listening(config: ProxyConfig) -> Iterator[list[Sockets]]:
    """Sockets on one port: for each worker, one for each address of the host.

    A Unix socket is one for all workers: it has no `SO_REUSEPORT`.

    Raises:
        CannotListen: the address cannot be had.
    """
    with ExitStack() as stack:
        groups: list[Sockets]
        with binding(config):
            if config.uds is None:
                groups = _bound_to_one_port(config, stack)
            else:
                groups = [(stack.enter_context(listening_at(config.uds, BACKLOG)),)]
                groups *= config.workers
        yield groups


def _bound_to_one_port(config: ProxyConfig, stack: ExitStack) -> list[Sockets]:
    port, by_address = config.port, list[Sockets]()
    for family, (host, _, *scope) in _addresses(config.host):
        # Bound without SO_REUSEPORT, the first one is refused where anyone listens already.
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
