"""Addresses of the hosts of instances, kept and renewed in the background.

A name server that fails or is slow says nothing about an instance, so its last addresses stay in
use meanwhile.
"""

import asyncio
import errno
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import structlog
from aiohappyeyeballs import start_connection

RENEWED_S = 10.0
"""Age at which the addresses of a name are looked up again in the background, in seconds."""
UNUSED_S = 60.0
"""Time without a connect after which the addresses of a name are dropped, in seconds."""
MISSING_S = 60.0
"""Time for which a name must not exist before its last addresses are dropped, in seconds."""
AT_ONCE = 64
"""Maximum number of concurrent lookups, each of which has a thread."""
NEXT_ADDRESS_S = 0.25
"""Delay before the next one of several addresses is tried (RFC 8305, section 5), in seconds."""

MISSING = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})
"""Error numbers of a name that does not exist or has no address."""

Host = tuple[str, int]
Address = tuple[int, int, int, str, Any]


@dataclass(slots=True)
class _Known:
    """What is known of a host.

    Attributes:
        addresses: its last addresses; empty if none are known.
        renew_s: time of the next lookup, on the event loop's clock, as all times.
        used_s: time of the last connect.
        missing_s: time since which the name has not existed.
        failing: whether the last lookup failed.
        look_up: the lookup in progress.
    """

    addresses: deque[Address] = field(default_factory=deque)
    renew_s: float = 0.0
    used_s: float = 0.0
    missing_s: float = math.inf
    failing: bool = False
    look_up: asyncio.Task[None] | None = None


class Addresses:
    """Connects to hosts by name. Belongs to one event loop."""

    def __init__(self) -> None:
        self.renewed_s = RENEWED_S
        self.unused_s = UNUSED_S
        self.missing_s = MISSING_S
        self._loop = asyncio.get_running_loop()
        self._known: dict[Host, _Known] = {}
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def __len__(self) -> int:
        return len(self._known)

    async def close(self) -> None:
        tasks = [known.look_up for known in self._known.values() if known.look_up is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a connection to one of a host's addresses. The order rotates with each call.

        Raises:
            OSError: the host has no address, or none accepts a connection.
        """
        known = self._of((host, port))
        if known.look_up is None and self._loop.time() >= known.renew_s:
            known.look_up = self._loop.create_task(self._renew((host, port), known))
            known.look_up.add_done_callback(_retrieve)
        if not known.addresses and known.look_up is not None:
            await asyncio.shield(known.look_up)
        tried = list(known.addresses)
        known.addresses.rotate(-1)
        try:
            return await start_connection(tried, happy_eyeballs_delay=NEXT_ADDRESS_S, interleave=1)
        except BaseException:  # also a timeout of the caller
            known.renew_s = 0.0  # the host may have moved
            raise

    def _of(self, host: Host) -> _Known:
        """Return what is known of a host. Drop unused hosts: clients can name any number."""
        now_s = self._loop.time()
        known = self._known.pop(host, None)
        if known is None:
            known = _Known()
        known.used_s = now_s
        self._known[host] = known  # the last used host is the last one
        for name, other in list(islice(self._known.items(), 2)):
            if now_s - other.used_s > self.unused_s and other.look_up is None:
                del self._known[name]
        return known

    async def _renew(self, host: Host, known: _Known) -> None:
        """Look up a host. A failure is raised only if there are no addresses to use."""
        try:
            async with self._at_once:
                known.addresses = deque(await self._look_up(host))
            known.missing_s = math.inf
            if known.failing:
                known.failing = False
                structlog.get_logger("epd").info("name lookup works again", host=host[0])
        except (OSError, UnicodeError) as error:  # also invalid names
            missing = isinstance(error, socket.gaierror) and error.errno in MISSING
            now_s = self._loop.time()
            known.missing_s = min(known.missing_s, now_s) if missing else math.inf
            if now_s - known.missing_s >= self.missing_s:
                known.addresses.clear()
            if not known.addresses:
                self._known.pop(host, None)
                raise
            if not known.failing:
                known.failing = True
                structlog.get_logger("epd").warning(
                    "name lookup failed",
                    host=host[0],
                    reason=str(error),
                    next="its last addresses are used",
                )
        finally:
            known.renew_s = self._loop.time() + self.renewed_s if known.addresses else 0.0
            known.look_up = None

    def _look_up(self, host: Host) -> asyncio.Future[Sequence[Address]]:
        """Look up a host on a thread of its own.

        The lookup cannot be cancelled, and may take half a minute. In a pool of threads it could
        hold up all others, and the end of the process.
        """
        found: asyncio.Future[Sequence[Address]] = self._loop.create_future()

        def look_up() -> None:
            done: Callable[[], None]
            try:
                addresses = socket.getaddrinfo(
                    *host, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
                )
            except Exception as error:  # noqa: BLE001 - the caller gets it
                done = partial(found.set_exception, error)
            else:
                done = partial(found.set_result, addresses)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(lambda: None if found.done() else done())

        try:
            threading.Thread(target=look_up, name="name-lookup", daemon=True).start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, "no thread for the lookup") from error
        return found


def _retrieve(look_up: asyncio.Task[None]) -> None:
    """Mark the error of a lookup as retrieved: nothing may wait for it any more."""
    if not look_up.cancelled():
        look_up.exception()
