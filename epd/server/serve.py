"""`epd serve`: the process that serves the application, alone or as one of several workers."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog
import uvloop
from aiohttp import web

from epd.check import add_settings_command, load_or_exit
from epd.config import ProxyConfig
from epd.conversations import conversations
from epd.edge.drain import DRAIN
from epd.edge.files import Files
from epd.edge.listening import (
    CannotListen,
    Site,
    Sockets,
    binding_errors,
    bound_sockets,
    log_listening,
)
from epd.edge.protocol import Runner
from epd.http.tls import TlsInvalid
from epd.observe import logs
from epd.parser import Commands, Parser
from epd.server.app import create_app
from epd.server.app_keys import BACKGROUND, OBSERVERS
from epd.server.operator_routes import METRICS
from epd.tenants import KeysInvalid
from epd.workers.orders import (
    CLEANUP_S,
    CUT_S,
    Orders,
    block_signals,
    first_of,
    orders_by_pipe,
    orders_by_signal,
)
from epd.workers.process import collect_rarely, keep_freed_memory, raise_descriptor_limit
from epd.workers.supervisor import WorkersFailed, supervise
from epd.workers.worker import WorkerSlot

AT_ONCE_S = 0.01
"""Shortest timeout for aiohttp, in seconds: 0 would mean no limit."""
NOW_S = 1.0
"""Upper bound of the clean-up after a second signal, in seconds."""


def add_parser(commands: Commands) -> None:
    """Add `serve` to the commands of `epd`."""
    parser = commands.add_parser(
        "serve",
        help="run the proxy",
        description="Run an OpenAI-compatible proxy that sends media to encode instances, then "
        "the request to prefill and decode instances. Every flag can also be set as EPD_<FLAG> in "
        "the environment or by name in the file of --config. OPENAI_API_KEY is sent to the "
        "instances if a client sends no key; ADMIN_API_KEY opens /metrics and profiling.",
        epilog="example: epd serve --encode-servers-urls http://e1:8001,http://e2:8001 "
        "--decode-servers-urls http://pd:8002",
        usage="epd serve --encode-servers-urls URLS --decode-servers-urls URLS [FLAG ...]",
    )
    add_settings_command(parser, _serve)


def _serve(parser: Parser, **flags: Any) -> None:
    config = load_or_exit(parser, flags).config
    block_signals()  # before the first line is logged, by a thread
    logs.configure(config.log_format, config.log_level)
    raise_descriptor_limit()
    conversations.warn_of(config)

    try:
        if config.workers == 1:
            uvloop.run(serve(config))
        else:
            # Not uvloop: a fork cannot leave its loop, and starts another one.
            asyncio.run(supervise(config, serve_as_worker))
    except (KeysInvalid, TlsInvalid) as error:  # a file changed after its check
        parser.errors([str(error)])
    except (CannotListen, WorkersFailed, OSError) as failure:
        sys.exit(f"epd serve: {failure}")


async def serve(config: ProxyConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain. At the second signal, stop at once.

    Args:
        config: configuration; SIGHUP reloads the files of keys and certificates.

    Raises:
        CannotListen: the address cannot be bound.
        OSError: memory or descriptors are exhausted.
        KeysInvalid: the keys file cannot be used.
        TlsInvalid: a certificate or a key cannot be used.
    """
    log = structlog.get_logger("epd")
    orders, files = orders_by_signal(config), Files(config)
    with bound_sockets(config) as (sockets,):
        async with run_server(config, orders, files) as runner:
            with binding_errors(config):
                await _listen(runner, files, sockets)
            for listener in sockets:
                log_listening(config, listener.getsockname())
            await orders.drain.wait()
            log.info("draining", cause=orders.cause)
            await orders.close.wait()
            log.info("stopping")


async def serve_as_worker(slot: WorkerSlot, config: ProxyConfig, files: Files, pipe: int) -> None:
    """Serve on the sockets of a slot until the first process orders the end, or has ended.

    SIGUSR1 stops the worker at once. The arguments are those of a `WorkerMain`.
    """
    orders = orders_by_pipe(pipe)
    async with run_server(config, orders, files, slot) as runner:
        await _listen(runner, files, slot.sockets)
        structlog.get_logger("epd").info("serving", pid=os.getpid())
        await orders.close.wait()
    # The last requests and releases have ended just now.
    if (workers := runner.app[METRICS].workers) is not None:
        workers.pages.write()


async def _listen(runner: Runner, files: Files, sockets: Sockets) -> None:
    for listener in sockets:
        await Site(runner, files.tls, runner.app[BACKGROUND], listener).start()


@asynccontextmanager
async def run_server(
    config: ProxyConfig, orders: Orders, files: Files, slot: WorkerSlot | None = None
) -> AsyncIterator[Runner]:
    """Run the application without a listening address, and obey orders to drain and to reload.

    The end of the context waits for the running requests, up to `drain_timeout_s`.
    """
    keep_freed_memory()
    app = create_app(config, files=files, slot=slot)
    runner = Runner(app, config, app[OBSERVERS])
    reload = partial(_reload, app, orders, files)
    await runner.setup()
    collect_rarely()
    obeying = [
        asyncio.create_task(app[BACKGROUND].keep_running(order, obey))
        for order, obey in (("drain", partial(_drain, app, orders)), ("reload", reload))
    ]
    try:
        yield runner
    finally:
        await _end(runner, config.drain_timeout_s, orders.now)
        for task in obeying:
            task.cancel()


async def _drain(app: web.Application, orders: Orders) -> None:
    await orders.drain.wait()
    app[DRAIN].began = True


async def _reload(app: web.Application, orders: Orders, files: Files) -> None:
    log = structlog.get_logger("epd")
    while True:
        await orders.reload.wait()
        orders.reload.clear()
        reasons = files.reload()
        for what, reason in reasons.items():
            if reason:
                log.error("not reloaded", what=what, reason=reason)
            else:
                log.info("reloaded", what=what)
        app[METRICS].reloaded(not any(reasons.values()))


async def _end(runner: web.AppRunner, timeout_s: float, now: asyncio.Event) -> None:
    for site in runner.sites:
        await site.stop()
    await asyncio.sleep(0)  # connections that were just accepted are read first
    await first_of(_finished(runner), asyncio.sleep(timeout_s), now.wait())
    if not now.is_set():
        runner.app[DRAIN].cut_off()
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
