"""Pool of idle connections to instances."""

import asyncio
import math
import ssl
from collections import deque
from collections.abc import Mapping
from functools import partial

from epd.http.addresses import Addresses
from epd.http.connection import Connection, Unreachable
from epd.http.http1 import Origin, target_of

CONNECT_TIMEOUT_S = 2.0
"""Maximum time of a connect to an instance, in seconds."""

LAST_LOOK_S = 0.05
"""Time for which a connect may take longer than its timeout, in seconds."""


class Pool:
    """Idle connections by origin. Belongs to one event loop."""

    def __init__(
        self,
        tls: ssl.SSLContext,
        *,
        keep_alive_s: float,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Start without connections; an idle one is closed after `keep_alive_s` seconds.

        `connect_timeout_s` limits a connect, including lookup and TLS handshake.
        """
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
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
        now_s = self._loop.time()
        within_s = now_s + self._connect_timeout_s
        due_s = max(min(within_s, until_s), now_s)
        limit = asyncio.timeout(None)
        timer = self._loop.call_at(due_s, self._expire, limit, due_s)
        try:
            async with limit:
                return await self._connect(origin)
        except (OSError, UnicodeError) as error:  # also timeouts, and invalid names
            if limit.expired() and until_s < within_s:
                raise TimeoutError from error
            raise Unreachable from error
        finally:
            timer.cancel()

    def _expire(self, limit: asyncio.Timeout, due_s: float) -> None:
        """Let a connect time out after a last look at its socket.

        uvloop runs timers before it reads from sockets. If the process was stopped or blocked, a
        connection that was established in time would count as a failure of the instance.
        """
        now_s = self._loop.time()
        late_s = min(now_s - due_s, self._connect_timeout_s)
        limit.reschedule(now_s + max(late_s, LAST_LOOK_S))

    async def _connect(self, origin: Origin) -> Connection:
        connecting, tls, name = partial(Connection, origin), None, None
        if origin.tls:
            tls, name = self._tls, self._server_names.get(origin, origin.host).rstrip(".")
        if not origin.is_name:
            _, connection = await self._loop.create_connection(
                connecting, origin.host, origin.port, ssl=tls, server_hostname=name
            )
            return connection
        opened = await self._addresses.connect(origin.host, origin.port)
        try:
            _, connection = await self._loop.create_connection(
                connecting, sock=opened, ssl=tls, server_hostname=name
            )
        except BaseException:
            opened.close()
            raise
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request if it can be reused; else close it."""
        if self._closed or not connection.is_usable:
            connection.abort()
            return
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
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
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
        await self._addresses.close()
