"""Servers of a memory that proxies of other hosts reach over TCP, on the event loop of a test."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ec_store import EntryKey
from ec_store.arena.extents import ExtentAllocator
from ec_store.arena.fields import encode_header, key_digest
from ec_store.arena.index import ArenaIndex, Client, Slot
from ec_store.arena.memory import create_memory
from ec_store.arena.remote import RemoteServer, bind_tcp
from ec_store.arena.remote_store import RemoteArenaStore
from ec_store.arena.remote_url import RemoteOptions
from ec_store.arena.server import ArenaServer
from ec_store.arena.sockets import bind
from ec_store.arena.tier import Tier
from ec_store.entry import Entry
from ec_store.keys import encode_name

KEY = "a-key-of-the-servers"
MIB = 2**20


@dataclass
class Host:
    """Server of one host's memory."""

    server: ArenaServer
    remote: RemoteServer
    address: str
    port: int

    def add(self, key: EntryKey, entry: Entry) -> None:
        """Store an entry as an engine of this host would, without its bytes."""
        index, client, now_s = self.server.arena.index, Client(), self.server.clock()
        slot = Slot(key_digest(key), encode_name(key.namespace), entry.data.nbytes, False)
        number = index.begin(client, slot, now_s)
        assert isinstance(number, int)
        assert index.commit(client, number, encode_header(key, entry), now_s)

    def options(self, **changes: Any) -> RemoteOptions:
        fields = {"host": "127.0.0.1", "port": self.port, "secure": False, "key": KEY}
        return RemoteOptions(**{**fields, "timeout_s": 10, **changes})


@asynccontextmanager
async def remote_host(
    path: Path,
    tls: ssl.SSLContext | None = None,
    *,
    port: int = 0,
    tier: Tier | None = None,
    tier_name: str = "",
    **options: Any,
) -> AsyncIterator[Host]:
    """Serve a memory on a Unix socket, and to proxies of other hosts."""
    memory = create_memory(8 * MIB, MIB)
    listener = bind_tcp("127.0.0.1", port)
    port = listener.getsockname()[1]
    address = f"shm+{'tls' if tls else 'tcp'}://127.0.0.1:{port}"
    index = ArenaIndex(ExtentAllocator(memory.size_bytes, MIB))
    server = ArenaServer(memory, index, address=address, tier_name=tier_name)
    await server.start(bind(path, 0o600), {} if tier is None else {"redis": tier})
    remote = RemoteServer(server, KEY, tls, **options)
    remote.start(listener)
    try:
        yield Host(server, remote, address, port)
    finally:
        await remote.close()
        await server.close()


@asynccontextmanager
async def opened(options: RemoteOptions) -> AsyncIterator[RemoteArenaStore]:
    store = RemoteArenaStore(options)
    try:
        yield store
    finally:
        await store.close()


async def sent(port: int, *messages: bytes) -> bytes:
    """Send bytes on a connection of its own; return all that the server sends until it ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(messages))  # `writelines` never ends in Python 3.13.0 if it is lost
    writer.write_eof()
    received = bytearray()
    try:
        async with asyncio.timeout(10):
            while data := await reader.read(2**16):
                received += data
    except ConnectionError:
        pass
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    return bytes(received)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
