"""Server of an arena on a thread of the test process."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ec_store import EntryKey
from ec_store.arena.connection import ArenaConnection, MappedArena
from ec_store.arena.extents import ExtentAllocator
from ec_store.arena.index import ArenaIndex
from ec_store.arena.memory import create_memory
from ec_store.arena.protocol import Pin, Pins, Read
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


def hashed_pin(connection: ArenaConnection, key: EntryKey) -> tuple[Pin, MappedArena]:
    """Pin an entry when it has a checksum."""
    deadline_s = time.monotonic() + 10
    while True:
        reply, arena = connection.call(Read([bytes.fromhex(key.digest)]), Pins)
        [pin] = reply.pins
        if pin.checksum:
            return pin, arena
        arena.released.append(pin.number)
        assert time.monotonic() < deadline_s, f"no checksum of {pin}"
        time.sleep(0.002)
