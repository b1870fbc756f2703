"""Addresses of host names, with one lookup for all concurrent connects."""

import asyncio
import socket
from collections import deque
from dataclasses import dataclass
from typing import Any

from aiohappyeyeballs import start_connection

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
        """Return the number of hosts with a cached answer."""
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
            self._kept = {one: kept for one, kept in self._kept.items() if now_s < kept[0]}
        addresses: deque[Address] = deque(found)
        self._kept[host] = now_s + KEPT_S, addresses
        return addresses
