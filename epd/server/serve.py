"""A process that serves the application until it is told to stop."""

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
from epd.server.reload import RELOAD
from epd.server.slots import BACKGROUND, KEYS, OBSERVERS
from epd.server.web import application
from epd.tenants import ApiKeys

CUT_S = 5.0
"""For requests that were told to end to send their last words."""
CLEANUP_S = 10.0
"""For what the application still does upstream when no request runs any more."""
AT_ONCE_S = 0.01
"""aiohttp takes 0 for no limit."""
NOW_S = 1.0
"""What cleaning up takes at most after a second signal."""


class Orders:
    """What a process has been told, by signals or by the process that started it.

    Attributes:
        drain: say that you are about to stop, and go on.
        close: take no more connections, let requests end, and stop.
        now: let nothing end.
        reload: read the configuration and files anew; whoever does clears it.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.close = asyncio.Event()
        self.now = asyncio.Event()
        self.reload = asyncio.Event()

    def stop(self) -> None:
        """Close without delay."""
        self.drain.set()
        self.close.set()

    def end(self, delay_s: float = 0) -> None:
        """Drain, and close after a delay; told so once more, end now."""
        if self.drain.is_set():
            self.now.set()
            self.stop()
        else:
            self.drain.set()
            asyncio.get_running_loop().call_later(delay_s, self.close.set)


def orders_by_signal(live: LiveConfig) -> Orders:
    """The orders of whoever sends this process signals."""
    orders = Orders()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: orders.end(live.current.drain_delay_s))
    # Ctrl-C: no load balancer has to learn of it, and somebody waits.
    loop.add_signal_handler(signal.SIGINT, orders.end)
    loop.add_signal_handler(signal.SIGHUP, orders.reload.set)
    return orders


async def serve(live: LiveConfig, read: Callable[[], ProxyConfig]) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end; at the second, stop at once.

    Args:
        live: what is in force; what may change of it does at SIGHUP.
        read: what is configured then.

    Raises:
        CannotListen: the address cannot be had.
        OSError: there is no memory, or no descriptor.
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
    """Where to listen; what has to be undone afterwards is left to the stack."""
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
    """The application, as yet without an address, that obeys orders to drain and to reload.

    Leaving waits for the requests that run, within limits.

    Args:
        live: what is in force.
        orders: what to obey.
        tls: the context that clients are served with.
        read: what is configured by the time of a reload.
        named: where files are read anew, if that is elsewhere than at the start.
    """
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
    gc.freeze()  # what is here now stays: each full collection would look at it, for 50 ms
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
    await asyncio.sleep(0)  # what has just been accepted is heard first
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
    """Wait until all requests have ended and their answers are sent."""
    await runner.app[DRAIN].idle()
    if runner.server is not None:
        # Not before, as `runner.cleanup` does: it deafens connections that are sending a body.
        runner.server.pre_shutdown()
        await runner.server.shutdown(None)


async def _later(event: asyncio.Event, delay_s: float) -> None:
    await event.wait()
    await asyncio.sleep(delay_s)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them has ended, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def url(config: ProxyConfig, address: Any) -> str:
    """Where clients reach it, by the address of a socket that listens."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port, *_ = address
    return f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{port}"


def topology(config: ProxyConfig) -> str:
    """The instances in short, such as `2e1p1d`; `dynamic` where they come and go."""
    if config.dynamic:
        return "dynamic"
    encode, decode = len(config.encode_servers_urls), len(config.decode_servers_urls)
    prefill = len(config.prefill_servers_urls)
    encodes = f"{encode}e" if encode else ""
    return f"{encodes}{prefill}p{decode}d" if prefill else f"{encodes}{decode}pd"
