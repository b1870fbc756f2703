"""Index of another host's memory for a proxy: look-ups, leases and claims over TCP."""

import asyncio
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from ec_store.arena.aio_store import AsyncArenaStore
from ec_store.arena.protocol import VERSION, Hello
from ec_store.arena.remote_url import RemoteOptions
from ec_store.entry import Entry
from ec_store.errors import StoreUnavailable
from ec_store.keys import EntryKey


@dataclass(frozen=True)
class RemoteEndpoint:
    """Address of the server of another host."""

    options: RemoteOptions

    @property
    def name(self) -> str:
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"the arena at {host}:{self.options.port}"

    @property
    def hello(self) -> Hello:
        return Hello(VERSION, "proxy", self.options.key)

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """Context that verifies the server, read once. Raise OSError for an unusable file."""
        if not self.options.secure:
            return None
        context = ssl.create_default_context(cafile=self.options.ssl_ca_certs)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    async def open(self, link: asyncio.Protocol) -> socket.socket:
        loop, options, tls = asyncio.get_running_loop(), self.options, self.tls
        server_name = None if tls is None else options.server_name or options.host
        addresses = await loop.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, address) in enumerate(addresses, 1):
            connection = socket.socket(family, kind, protocol)
            connection.setblocking(False)
            try:
                await loop.sock_connect(connection, address)
                await loop.create_connection(
                    lambda: link, sock=connection, ssl=tls, server_hostname=server_name
                )
            except BaseException as error:
                connection.close()
                if number == len(addresses) or not isinstance(error, OSError):
                    raise
            else:
                return connection
        raise OSError("its name has no address")


class RemoteArenaStore(AsyncArenaStore):
    """Entries of another host's memory: no writes, no deletes, and no payloads.

    Clients' names of media, which are entries, are not written: they have to send the media again.
    """

    def __init__(self, options: RemoteOptions) -> None:
        """Create the store; the first call connects it."""
        super().__init__(RemoteEndpoint(options), options.timeout_s)

    @property
    def arena(self) -> bytes:
        """Name of the server's memory, another one after each start; empty before a connection."""
        return self._connection.arena

    async def put(self, key: EntryKey, entry: Entry, *, replace: bool = False) -> bool:  # noqa: ARG002
        """Write nothing, and return False as for an entry that another process is writing."""
        return False

    async def delete(self, keys: Sequence[EntryKey]) -> NoReturn:  # noqa: ARG002
        """Raise StoreUnavailable: nothing is deleted over TCP."""
        raise StoreUnavailable("entries of another host's memory are deleted on that host alone")
