"""Process that serves the application until a signal stops it."""

import asyncio
import gc
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import structlog
from aiohttp import web

from epd.config import ProxyConfig
from epd.config.live import LiveConfig
from epd.edge.drain import DRAIN
from epd.edge.listening import BACKLOG, Site, binding
from epd.edge.protocol import Runner
from epd.edge.tls import renew, server_context
from epd.edge.unix_socket import listening_at
from epd.server.files import read_keys
from epd.server.memory import keep_freed_memory
from epd.server.reload import RELOAD
from epd.server.slots import BACKGROUND, KEYS, OBSERVERS
from epd.server.web import application
from epd.tenants import ApiKeys

CUT_S = 5.0
"""Time for cancelled requests to send the end of their responses, in seconds."""
CLEANUP_S = 10.0
"""Time for the application's upstream work after the last request, in seconds."""
AT_ONCE_S = 0.01
"""Shortest timeout for aiohttp, in seconds: 0 would mean no limit."""
NOW_S = 1.0
"""Upper bound of the clean-up after a second signal, in seconds."""


class Orders:
    """Orders to a process, from signals or from the process that started it.

    Attributes:
        drain: report in `/ready` that the process is about to stop, and serve as before.
        close: close the listening sockets, wait for the running requests, and stop.
        now: stop without waiting for the running requests.
        reload: reload the configuration and files; the code that reloads clears the event.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.close = asyncio.Event()
        self.now = asyncio.Event()
        self.reload = asyncio.Event()

    def stop(self) -> None:
        self.drain.set()
        self.close.set()

    def end(self, delay_s: float = 0) -> None:
        """Drain, and close after a delay in seconds; at the second call, stop now."""
        if self.drain.is_set():
            self.now.set()
            self.stop()
        else:
            self.drain.set()
            asyncio.get_running_loop().call_later(delay_s, self.close.set)


def orders_by_signal(live: LiveConfig) -> Orders:
    """Return orders that SIGTERM, SIGINT and SIGHUP to this process set."""
    orders = Orders()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: orders.end(live.current.drain_delay_s))
    # Ctrl-C: there is no load balancer to notify, and the operator waits at the terminal.
    loop.add_signal_handler(signal.SIGINT, orders.end)
    loop.add_signal_handler(signal.SIGHUP, orders.reload.set)
    return orders


async def serve(live: LiveConfig, read: Callable[[], ProxyConfig]) -> None:
    """Serve until SIGTERM or SIGINT, then drain. At the second signal, stop at once.

    Args:
        live: configuration in force; SIGHUP reloads its reloadable settings.
        read: function that reads the configuration for a reload.

    Raises:
        CannotListen: the address cannot be bound.
        OSError: memory or descriptors are exhausted.
        KeysInvalid: the keys file cannot be used.
        TlsInvalid: a certificate or a key cannot be used.
    """
    log = structlog.get_logger("epd")
    config = live.current
    orders, tls = orders_by_signal(live), server_context(config)
    with ExitStack() as stack:
        with binding(config):
            where = _where(config, stack)
        async with running(live, orders, tls, read) as runner:
            with binding(config):
                await Site(runner, tls, runner.app[BACKGROUND], **where).start()
            for address in runner.addresses:
                log.info("listening", url=url(config, address), topology=topology(config))
            await orders.drain.wait()
            log.info("draining")
            await orders.close.wait()
            log.info("stopping")


def _where(config: ProxyConfig, stack: ExitStack) -> dict[str, Any]:
    """Return the address to listen on, as arguments for `Site`; the stack closes a Unix socket."""
    if config.uds is None:
        return {"host": config.host, "port": config.port}
    return {"sock": stack.enter_context(listening_at(config.uds, BACKLOG))}


@asynccontextmanager
async def running(
    live: LiveConfig,
    orders: Orders,
    tls: ssl.SSLContext | None,
    read: Callable[[], ProxyConfig],
    named: ProxyConfig | None = None,
) -> AsyncIterator[Runner]:
    """Run the application without a listening address, and obey orders to drain and to reload.

    The end of the context waits for the running requests, up to `drain_timeout_s`.

    Args:
        live: configuration in force.
        orders: orders to obey.
        tls: TLS context for clients; None for plain HTTP.
        read: function that reads the configuration for a reload.
        named: configuration with the paths to reload files from, if they differ from those of
            the start.
    """
    keep_freed_memory()
    app = application(live)
    runner = Runner(app, live, app[OBSERVERS])
    app[RELOAD].add_config(live, read)
    if KEYS in app:
        app[RELOAD].add("API keys", partial(_renew_keys, app[KEYS], live))
    if tls is not None:
        app[RELOAD].add("certificate", lambda: renew(tls, live.current))
    await runner.setup()
    if named is not None:
        live.current = named
    gc.freeze()  # these objects live on: each full collection would spend 50 ms on them
    obeying = [
        asyncio.create_task(app[BACKGROUND].keep(order, partial(obey, app, orders)))
        for order, obey in (("drain", _drain), ("reload", _reload))
    ]
    try:
        yield runner
    finally:
        await _end(runner, live.current.drain_timeout_s, orders.now)
        for task in obeying:
            task.cancel()


def _renew_keys(keys: ApiKeys, live: LiveConfig) -> None:
    if (others := read_keys(live.current)) is not None:
        keys.replace(others)


async def _drain(app: web.Application, orders: Orders) -> None:
    await orders.drain.wait()
    app[DRAIN].begin()


async def _reload(app: web.Application, orders: Orders) -> None:
    while True:
        await orders.reload.wait()
        orders.reload.clear()
        app[RELOAD]()


async def _end(runner: web.AppRunner, timeout_s: float, now: asyncio.Event) -> None:
    for site in runner.sites:
        await site.stop()
    await asyncio.sleep(0)  # connections that were just accepted are read first
    await first_of(_finished(runner), asyncio.sleep(timeout_s), now.wait())
    if not now.is_set():
        runner.app[DRAIN].cut()
        await first_of(_finished(runner), asyncio.sleep(CUT_S), now.wait())
    if runner.server is not None:
        await runner.server.shutdown(AT_ONCE_S)
    cleanup = asyncio.create_task(runner.cleanup())
    await first_of(asyncio.wait([cleanup], timeout=CLEANUP_S), _later(now, NOW_S))
    cleanup.cancel()
    await asyncio.wait([cleanup])
    if not cleanup.cancelled():
        cleanup.result()


async def _finished(runner: web.AppRunner) -> None:
    """Wait until all requests have ended and their responses are sent."""
    await runner.app[DRAIN].idle()
    if runner.server is not None:
        # `runner.cleanup` does this earlier, and then connections that send a body are not read.
        runner.server.pre_shutdown()
        await runner.server.shutdown(None)


async def _later(event: asyncio.Event, delay_s: float) -> None:
    await event.wait()
    await asyncio.sleep(delay_s)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of the coroutines has ended, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def url(config: ProxyConfig, address: Any) -> str:
    """Return the URL for clients, from the address of a listening socket."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port, *_ = address
    return f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{port}"


def topology(config: ProxyConfig) -> str:
    """Return the number of instances per role, such as `2e1p1d`; `dynamic` if it may change."""
    if config.dynamic:
        return "dynamic"
    encode, decode = len(config.encode_servers_urls), len(config.decode_servers_urls)
    prefill = len(config.prefill_servers_urls)
    encodes = f"{encode}e" if encode else ""
    return f"{encodes}{prefill}p{decode}d" if prefill else f"{encodes}{decode}pd"
