"""Pool of idle connections to instances, and lookups of the addresses of their hosts.

All concurrent connects to a host share one lookup.
"""

import asyncio
import math
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohappyeyeballs import start_connection

from epd.http.connection import Connection, Unreachable
from epd.http.http1 import Origin, target_of

KEPT_S = 10.0
"""Time for which an answer of the resolver is cached, in seconds."""
NEXT_ADDRESS_S = 0.25
"""Delay before the next one of several addresses is tried (RFC 8305, section 5), in seconds."""

Host = tuple[str, int]
Address = tuple[int, int, int, str, tuple[Any, ...]]


@dataclass(slots=True)
class _LookUp:
    task: asyncio.Task[deque[Address]]
    waiters: int = 0


class Addresses:
    """Connects to hosts by name. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._kept: dict[Host, tuple[float, deque[Address]]] = {}
        self._look_ups: dict[Host, _LookUp] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def close(self) -> None:
        """Cancel all lookups, and wait for their end."""
        tasks = [look_up.task for look_up in self._look_ups.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a connection to one of a host's addresses. The order rotates with each call.

        Raises:
            OSError: the host has no address, or none accepts a connection.
        """
        until_s, addresses = self._kept.get((host, port), (0.0, deque[Address]()))
        if self._loop.time() >= until_s:
            addresses = await self._looked_up((host, port))
        tried = list(addresses)
        addresses.rotate(-1)
        return await start_connection(tried, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1)

    async def _looked_up(self, host: Host) -> deque[Address]:
        """Look up a host, once for all concurrent callers; cancel a lookup without callers."""
        look_up = self._look_ups.get(host)
        if look_up is None:
            look_up = self._look_ups[host] = _LookUp(self._loop.create_task(self._look_up(host)))
        look_up.waiters += 1
        try:
            return await asyncio.shield(look_up.task)
        finally:
            look_up.waiters -= 1
            if not look_up.waiters:
                look_up.task.cancel()
                if self._look_ups.get(host) is look_up:
                    del self._look_ups[host]

    async def _look_up(self, host: Host) -> deque[Address]:
        name, port = host
        found = await self._loop.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        if not found:
            raise OSError("the host has no address")
        now_s = self._loop.time()
        if host not in self._kept:  # drop expired entries: clients can name any number of hosts
            self._kept = {name: kept for name, kept in self._kept.items() if now_s < kept[0]}
        addresses: deque[Address] = deque(found)
        self._kept[host] = now_s + KEPT_S, addresses
        return addresses


class Pool:
    """Idle connections by origin. Belongs to one event loop.

    Attributes:
        connect_timeout_s: timeout of a connect, including lookup and TLS handshake; may be changed
            at any time.
    """

    def __init__(
        self, tls: ssl.SSLContext, *, connect_timeout_s: float, keep_alive_s: float
    ) -> None:
        """Start without connections; an idle one is closed after `keep_alive_s` seconds."""
        self._tls = tls
        self.connect_timeout_s = connect_timeout_s
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._addresses = Addresses()
        self._idle: dict[Origin, deque[Connection]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self._server_names: Mapping[Origin, str] = {}

    def verify_as(self, names: Mapping[str, str]) -> None:
        """Set the expected names in certificates, by base URL with an address as host."""
        self._server_names = {target_of(url).origin: name for url, name in names.items()}

    def take_connection(self, origin: Origin) -> Connection | None:
        """Return the most recently used idle connection; None if there is none."""
        idle = self._idle.get(origin)
        since_s = self._loop.time() - self._keep_alive_s
        while idle:
            connection = idle.pop()
            if connection.is_usable and connection.idle_since_s > since_s:
                return connection
            connection.abort()
        return None

    async def connect(self, origin: Origin, until_s: float = math.inf) -> Connection:
        """Return a new connection.

        Raises:
            Unreachable: it failed, or took longer than `connect_timeout_s`.
            TimeoutError: it was not established until `until_s`, on the event loop's clock.
        """
        within_s = self._loop.time() + self.connect_timeout_s
        limit = asyncio.timeout_at(min(within_s, until_s))
        try:
            async with limit:
                return await self._connect(origin)
        except (OSError, UnicodeError) as error:  # also timeouts, and invalid names
            if limit.expired() and until_s < within_s:
                raise TimeoutError from error
            raise Unreachable from error

    async def _connect(self, origin: Origin) -> Connection:
        tls = name = None
        if origin.tls:
            tls, name = self._tls, self._server_names.get(origin, origin.host).rstrip(".")
        if not origin.named:
            _, connection = await self._loop.create_connection(
                Connection, origin.host, origin.port, ssl=tls, server_hostname=name
            )
            return connection
        opened = await self._addresses.connect(origin.host, origin.port)
        try:
            _, connection = await self._loop.create_connection(
                Connection, sock=opened, ssl=tls, server_hostname=name
            )
        except BaseException:
            opened.close()
            raise
        return connection

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection for the next request if it can be reused; else close it."""
        if self._closed or not connection.is_usable:
            connection.abort()
            return
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(origin, deque()).append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._keep_alive_s, self._sweep)

    def _sweep(self) -> None:
        since_s = self._loop.time() - self._keep_alive_s
        for origin, idle in list(self._idle.items()):
            while idle and not (idle[0].is_usable and idle[0].idle_since_s > since_s):
                idle.popleft().abort()
            if not idle:
                del self._idle[origin]
        again = self._loop.call_later(self._keep_alive_s / 2, self._sweep) if self._idle else None
        self._sweeper = again

    async def close(self) -> None:
        """Close all idle connections, and keep none from now on."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
        await self._addresses.close()
