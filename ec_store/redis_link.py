"""Connections to Redis servers, each used by one caller at a time.

redis-py makes the connections and speaks the protocol. The pool is here, because its own lets a
connection be used again whose caller was interrupted between two replies
(https://nvd.nist.gov/vuln/detail/CVE-2023-28859).
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis._parsers import BaseParser
from redis.backoff import NoBackoff
from redis.connection import Connection, PythonRespSerializer, SSLConnection
from redis.retry import Retry

from ec_store.redis_url import Address, RedisOptions

Command = tuple[str | bytes | int | memoryview, ...]
"""Name, key, and what else."""

Reply = Any

SEND_PIECE_BYTES = 6000
"""Arguments larger than this are sent from where they lie (redis-py's own figure)."""

JOIN_BYTES = 64 * 1024
"""What is not more than this all together is sent in one piece, so that the server reads it so."""

LINE_BYTES = 64
"""What is received at a time to find the length of a value; the start of the value comes along."""

SKIP_BYTES = 64 * 1024

MAX_IDLE = 16
"""Connections that one server is kept for later."""


class _Socket:
    """A socket whose sending and receiving end at one time, however many calls there are.

    A timeout of its own bounds each call alone: a server that sends a byte now and then would hold
    its caller for as long as it likes.
    """

    def __init__(self, sock: Any, deadline_s: float) -> None:
        self._sock = sock
        self.deadline_s = deadline_s

    def recv(self, size: int) -> Any:
        self._limit()
        return self._sock.recv(size)

    def recv_into(self, room: Any) -> Any:
        self._limit()
        return self._sock.recv_into(room)

    def sendall(self, data: Any) -> None:
        left = memoryview(data).cast("B")
        while left:
            self._limit()
            left = left[self._sock.send(left) :]

    def _limit(self) -> None:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Link:
    """One connection. It is as good as new exactly when `owed` is 0."""

    def __init__(self, connection: Any, generation: int) -> None:
        self._connection = connection
        self._ahead = bytearray()
        self.owed = 0
        self.generation = generation

    @property
    def open(self) -> bool:
        """Whether it has a socket.

        An interrupted call can become garbage in a cycle: then redis-py closes the connection, and
        the call's own end keeps it, in either order.
        """
        return self._connection._sock is not None  # noqa: SLF001 - it has no public name

    def until(self, deadline_s: float) -> None:
        """When what is sent and received from now on ends, by the monotonic clock."""
        self._connection._sock.deadline_s = deadline_s  # noqa: SLF001 - it has no public name

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands in one go."""
        self.owed += len(commands)
        pieces = self._connection.pack_commands(commands)
        if sum(map(len, pieces)) <= JOIN_BYTES:
            pieces = [b"".join(pieces)]
        self._connection.send_packed_command(pieces)

    def read(self) -> Reply:
        """The next reply; an error that Redis replied is returned."""
        try:
            reply = self._connection.read_response(disable_decoding=True)
        except redis.ResponseError as error:
            reply = error
        self.owed -= 1
        return reply

    def read_into(self, room: memoryview) -> Reply:
        """The next reply, a value: its bytes go to `room`, and this returns how many they are.

        The value is received where it belongs; hiredis would make bytes of it, by way of two
        buffers of its own, at two thirds of the speed. Of replies that were asked for together all
        are read like this, or none. A value longer than `room` is not kept.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            parser: Any = BaseParser
            reply: Reply = parser.parse_error(rest.decode(errors="replace"))
        elif kind != b"$":
            raise redis.InvalidResponse(f"a value begins with {kind!r}")
        elif rest == b"-1":
            reply = None
        else:
            reply = int(rest)
            self._receive(room[: min(reply, len(room))])
            self._skip(max(0, reply - len(room)) + 2)
        self.owed -= 1
        if isinstance(reply, redis.ConnectionError):
            raise reply
        return reply

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            self._ahead += self._socket_call("recv", LINE_BYTES)
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line

    def _receive(self, room: memoryview) -> None:
        done = min(len(room), len(self._ahead))
        room[:done] = self._ahead[:done]
        del self._ahead[:done]
        while done < len(room):
            done += self._socket_call("recv_into", room[done:])

    def _skip(self, count: int) -> None:
        left = count
        while left:
            piece = min(left, SKIP_BYTES)
            self._receive(memoryview(bytearray(piece)))
            left -= piece

    def _socket_call(self, name: str, argument: object) -> Any:
        """Receive from redis-py's socket; it has no public name."""
        try:
            received = getattr(self._connection._sock, name)(argument)  # noqa: SLF001
        except TimeoutError:
            raise redis.TimeoutError("Timeout reading from socket") from None
        except OSError as error:
            raise redis.ConnectionError(f"Error while reading from socket: {error}") from None
        if not received:
            raise redis.ConnectionError("Connection closed by server.")
        return received

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.disconnect()


class Node:
    """One server and its idle connections. Safe for threads and over forks."""

    def __init__(self, address: Address, options: RedisOptions) -> None:
        self.address = address
        self._options = options
        # A deque needs no lock, which a fork could leave taken.
        self._idle: deque[Link] = deque()
        self._generation = 0
        self._closed = False
        self._pid = os.getpid()
        self.failed_s = 0.0
        """When a call last broke off, by the monotonic clock."""

    @contextmanager
    def link(self, deadline_s: float) -> Iterator[Link]:
        """A connection nobody else uses. It is kept only when every reply has been read.

        Args:
            deadline_s: when a call on it breaks off, by the monotonic clock.
        """
        try:
            link = self._take(deadline_s)
        except redis.RedisError:
            self.failed_s = time.monotonic()
            raise
        try:
            yield link
        finally:
            if link.owed:
                self.failed_s = time.monotonic()
                link.close()
            else:
                self._keep(link)

    def close(self) -> None:
        """Close the idle connections, and from now on each when its call is done."""
        self._closed = True
        self.forget()

    def forget(self) -> None:
        """Close the idle connections, and those in use after it: they may lead to an old server."""
        self._own()
        self._generation += 1
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return

    def _keep(self, link: Link) -> None:
        # Kept before it is looked at: whoever closes or forgets after the look finds it.
        self._idle.append(link)
        if self._closed or link.generation != self._generation or len(self._idle) > MAX_IDLE:
            with suppress(ValueError):  # another thread has taken or closed it
                self._idle.remove(link)
                link.close()

    def _take(self, deadline_s: float) -> Link:
        self._own()
        generation = self._generation
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                return Link(self._connect(deadline_s), generation)
            if link.open:
                link.until(deadline_s)
                return link

    def _own(self) -> None:
        if self._pid != os.getpid():
            self._idle, self._pid = deque(), os.getpid()

    def _connect(self, deadline_s: float) -> Any:
        connection = _connection(self.address, self._options, deadline_s)
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()
            raise
        return connection


def _connection(address: Address, options: RedisOptions, deadline_s: float) -> Any:
    """A connection that is not made yet; its methods have no types in redis-py."""
    plain: Any = Connection
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise redis.TimeoutError("Timeout connecting to server")

    def greet(connection: Any) -> None:
        connection._sock = _Socket(connection._sock, deadline_s)  # noqa: SLF001 - before its first use
        connection.on_connect()

    settings: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "db": options.db,
        "protocol": 2,
        "socket_timeout": left_s,
        "socket_connect_timeout": min(options.connect_timeout_s, left_s),
        "redis_connect_func": greet,
        "retry": Retry(NoBackoff(), 0),
        # hiredis' packer would copy every value first.
        "command_packer": PythonRespSerializer(SEND_PIECE_BYTES, _encode),
    }
    password = options.password
    if options.password_file is not None:
        try:
            password = options.password_file.read_text().strip()
        except (OSError, UnicodeError) as error:
            raise redis.ConnectionError(f"the password file cannot be read: {error}") from None
    if password is not None:
        settings |= {"username": options.username, "password": password}
    if options.tls is None:
        return plain(**settings)
    return SSLConnection(
        ssl_cert_reqs="required",
        ssl_check_hostname=True,
        ssl_ca_certs=options.tls.ca_certs,
        ssl_certfile=options.tls.certfile,
        ssl_keyfile=options.tls.keyfile,
        **settings,
    )


def _encode(argument: str | bytes | float | memoryview) -> bytes | memoryview:
    if isinstance(argument, bytes | memoryview):
        return argument
    return str(argument).encode()
