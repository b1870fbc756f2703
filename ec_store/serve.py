"""Command `ec-store serve`: starts the HTTP service of a store, and a host's memory if it is one.

Only this module and `ec_store.service` import aiohttp.
"""

import argparse
import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event

import uvloop
from aiohttp import web

from ec_store.access import is_loopback
from ec_store.aio import AsyncStore
from ec_store.arena.extents import ExtentAllocator
from ec_store.arena.index import ArenaIndex
from ec_store.arena.memory import create_memory
from ec_store.arena.remote import RemoteServer
from ec_store.arena.server import ArenaServer, raise_open_files
from ec_store.arena.sockets import bind
from ec_store.arena.store import ArenaStore
from ec_store.arena.tier import SharedTier, Tier
from ec_store.base import Store
from ec_store.config import shared_name, size_text
from ec_store.errors import StoreUnavailable
from ec_store.listening import Listening, listening
from ec_store.opening import open_tiers
from ec_store.service import create_app


def serve(store: Store, args: argparse.Namespace) -> int:
    """Serve a store until a signal stops this process, and return the exit status."""
    key = os.environ.get("EC_STORE_API_KEY", "")
    if not key and not is_loopback(args.host):
        print(
            f"ec-store: warning: every host that reaches {args.host}:{args.port} can read the "
            "store's metrics: set EC_STORE_API_KEY, or --host 127.0.0.1",
            file=sys.stderr,
        )
    app = create_app(AsyncStore(store), interval_s=args.interval_s, api_key=key)
    remote = listening(args)
    if isinstance(store, ArenaStore):
        tiers = open_tiers(args.tier)
        is_shared = any(isinstance(tier, SharedTier) for tier in tiers.values())
        tier_name = shared_name(args.tier[-1]) if is_shared else ""  # only the last one may be
        app.cleanup_ctx.append(partial(_serve_memory, store, tiers, tier_name, remote))
    elif args.tier:
        raise ValueError("--tier is for the memory of a host: serve shm:///path/of/socket")
    elif remote is not None:
        raise ValueError("--listen is for the memory of a host: serve shm:///path/of/socket")
    # uvloop halves the time of a round trip to the memory's server.
    web.run_app(app, host=args.host, port=args.port, access_log=None, loop=uvloop.new_event_loop())
    return 0


async def _serve_memory(
    store: ArenaStore,
    tiers: Mapping[str, Tier],
    tier_name: str,
    remote: Listening | None,
    _: web.Application,
) -> AsyncIterator[None]:
    """Allocate the memory of a store, and serve it while the application runs."""
    options = store.options
    path = Path(options.path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        listener = bind(path, options.mode)
    except OSError as error:
        raise StoreUnavailable(f"cannot listen at {path}: {error}") from error
    stopped = Event()
    try:  # on a thread, so that a signal can stop it
        memory = await asyncio.to_thread(create_memory, options.max_bytes, stopped=stopped.is_set)
    except OSError as error:
        listener.close()
        advice = ""
        if error.errno in {errno.ENOSYS, errno.EPERM}:
            advice = ": this kernel or container allows no memfd, use a store in a directory"
        text = f"no memory of {size_text(options.max_bytes)}: {error}{advice}"
        raise StoreUnavailable(text) from error
    finally:
        stopped.set()
    extents = ExtentAllocator(memory.size_bytes, memory.segment_bytes)
    # No client can take all of the memory from the others.
    index = ArenaIndex(extents, client_bytes=memory.size_bytes // 2, ttl_s=options.ttl_s)
    server = ArenaServer(
        memory,
        index,
        address="" if remote is None else remote.address,
        tier_name=tier_name,
        max_connections=raise_open_files(),
    )
    await server.start(listener, tiers)
    print(f"ec-store: {size_text(memory.size_bytes)} in {memory.pages} at {path}", file=sys.stderr)
    async with nullcontext() if remote is None else _serve_remote(server, remote):
        yield
        path.unlink(missing_ok=True)  # noqa: ASYNC240 - before another server may listen there
    await server.close()


@asynccontextmanager
async def _serve_remote(server: ArenaServer, remote: Listening) -> AsyncIterator[None]:
    """Serve proxies of other hosts, and read the certificate again at SIGHUP."""
    certificate = remote.certificate
    tls = None if certificate is None else certificate.context
    listener = RemoteServer(server, remote.key, tls)
    listener.start(remote.socket)
    loop = asyncio.get_running_loop()
    if certificate is not None:
        loop.add_signal_handler(signal.SIGHUP, certificate.reload)
    print(f"ec-store: proxies of other hosts reach it at {remote.address}", file=sys.stderr)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        await listener.close()
