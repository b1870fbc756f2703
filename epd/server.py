"""A process that serves the application until it is told to stop."""

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog
from aiohttp import web

from epd.config import ProxyConfig
from epd.middlewares import OBSERVERS
from epd.protocol import Runner
from epd.web import create_app

SHUTDOWN_TIMEOUT_S = 60.0
AT_ONCE_S = 0.01
"""aiohttp takes 0 for no limit."""


async def serve(config: ProxyConfig) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests end; at the second, stop at once.

    Raises:
        OSError: the address cannot be listened on.
    """
    log = structlog.get_logger("epd")
    stop, stop_now = stop_signals()
    async with running(config, stop_now) as runner:
        await web.TCPSite(runner, config.host, config.port).start()
        for host, port, *_ in runner.addresses:
            log.info("listening", url=f"http://{host}:{port}", topology=topology(config))
        await stop.wait()
        log.info("stopping")


def stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """What is set at the first SIGINT or SIGTERM, and what at the second."""
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stop, stop_now


@asynccontextmanager
async def running(config: ProxyConfig, stop_now: asyncio.Event) -> AsyncIterator[web.AppRunner]:
    """The application, as yet without an address. Leaving waits for requests until `stop_now`."""
    app = create_app(config)
    runner = Runner(app, config, app[OBSERVERS], shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        yield runner
    finally:
        await _end(runner, stop_now)


async def _end(runner: web.AppRunner, stop_now: asyncio.Event) -> None:
    cleanup = asyncio.create_task(runner.cleanup())
    await first_of(asyncio.wait([cleanup]), stop_now.wait())
    cleanup.cancel()
    await asyncio.wait([cleanup])
    if cleanup.cancelled() and runner.server is not None:  # what it had left to do
        await runner.server.shutdown(AT_ONCE_S)
        await runner.app.cleanup()
    else:
        cleanup.result()


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them has ended, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def topology(config: ProxyConfig) -> str:
    """The instances in short, such as `2e1p1d`."""
    encode, decode = len(config.encode_servers_urls), len(config.decode_servers_urls)
    prefill = len(config.prefill_servers_urls)
    return f"{encode}e{prefill}p{decode}d" if prefill else f"{encode}e{decode}pd"
