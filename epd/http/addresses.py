"""Addresses of hosts by name, looked up once for all who connect at the same time."""

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from aiohappyeyeballs import start_connection

from epd.flights import Flights

KEPT_S = 10.0
"""How long an answer of the resolver is remembered."""
NEXT_ADDRESS_S = 0.25
"""How long one address of several is tried by itself (RFC 8305, section 5)."""

Host = tuple[str, int]
Address = tuple[int, int, int, str, tuple[Any, ...]]


class Addresses:
    """Connects to hosts by name. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._flights: Flights[Host, Sequence[Address]] = Flights()
        self._kept: dict[Host, tuple[float, deque[Address]]] = {}

    def __len__(self) -> int:
        """How many hosts' answers are remembered."""
        return len(self._kept)

    async def close(self) -> None:
        """Ask for nothing any more."""
        await self._flights.close()

    async def connect(self, host: str, port: int) -> socket.socket:
        """A connection to one of a host's addresses, each time another one first.

        Raises:
            OSError: it has none, or there is none that can be connected to.
        """
        until_s, addresses = self._kept.get((host, port), (0.0, deque[Address]()))
        if self._loop.time() >= until_s:
            found = await self._flights.join((host, port), lambda: self._look_up(host, port))
            addresses = deque(found)
            self._keep((host, port), addresses)
        tried = list(addresses)
        addresses.rotate(-1)
        return await start_connection(tried, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1)

    def _keep(self, host: Host, addresses: deque[Address]) -> None:
        """Remember them. Who names hosts may name ever new ones: what is over is forgotten."""
        now_s = self._loop.time()
        if host not in self._kept:
            self._kept = {one: kept for one, kept in self._kept.items() if now_s < kept[0]}
        self._kept[host] = now_s + KEPT_S, addresses

    async def _look_up(self, host: str, port: int) -> Sequence[Address]:
        found = await self._loop.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        if not found:
            raise OSError("the host has no address")
        return found
