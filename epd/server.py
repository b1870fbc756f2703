"""A process that serves the application until it is told to stop."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

import structlog
from aiohttp import web

from epd.config import ProxyConfig
from epd.web import create_app

SHUTDOWN_TIMEOUT_S = 60.0


async def serve(config: ProxyConfig) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests end; at the second, stop at once.

    Raises:
        OSError: the address cannot be listened on.
    """
    log = structlog.get_logger("epd")
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    runner = web.AppRunner(
        create_app(config),
        handler_cancellation=True,
        access_log=None,
        # aiohttp logs headers that it cannot parse as they came, keys and all.
        logger=_silent(),
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        for host, port, *_ in runner.addresses:
            log.info("listening", url=f"http://{host}:{port}", topology=_topology(config))
        await stop.wait()
        log.info("stopping")
    finally:
        await _first_of(runner.cleanup(), stop_now.wait())


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them has ended, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _silent() -> logging.Logger:
    logger = logging.getLogger("epd.http")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


def _topology(config: ProxyConfig) -> str:
    encode, decode = len(config.encode_servers_urls), len(config.decode_servers_urls)
    prefill = len(config.prefill_servers_urls)
    return f"{encode}e{prefill}p{decode}d" if prefill else f"{encode}e{decode}pd"
