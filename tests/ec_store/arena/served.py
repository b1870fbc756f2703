"""Server of an arena, on a thread of the test process or in a process of its own."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ec_store.arena.extents import ExtentAllocator
from ec_store.arena.index import ArenaIndex
from ec_store.arena.memory import create_memory
from ec_store.arena.server import ArenaServer, bind

MIB = 2**20


@contextmanager
def serving(
    path: Path,
    size_bytes: int = 64 * MIB,
    *,
    segment_bytes: int = 2**30,
    client_bytes: int | None = None,
    **options: Any,
) -> Iterator[ArenaServer]:
    memory = create_memory(size_bytes, segment_bytes)
    extents = ExtentAllocator(size_bytes, segment_bytes)
    index = ArenaIndex(extents, client_bytes=client_bytes)
    started: list[ArenaServer] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        server = ArenaServer(memory, index, **options)
        server.start(bind(path, 0o600))
        started.append(server)
        ready.set()
        await asyncio.to_thread(done.wait)
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(10), "the server has not started"
        yield started[0]
    finally:
        done.set()
        thread.join()


@contextmanager
def in_process(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `ec-store serve` as a process of its own, and kill it at the end."""
    words = [sys.executable, "-m", "ec_store", "serve", f"shm://{path}?max_bytes=16MiB"]
    with subprocess.Popen([*words, "--port", "0"], stdout=subprocess.DEVNULL) as child:
        try:
            yield child
        finally:
            child.send_signal(signal.SIGCONT)
            child.kill()
