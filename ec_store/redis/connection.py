"""Connections to Redis servers, each used by one caller at a time.

hiredis parses replies, and redis-py provides the types of errors; only public interfaces of both
are used. The sockets are handled here for two reasons: one deadline covers everything that a call
sends and receives, and an entry's value is received into its final buffer.
"""

import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import hiredis
import redis

from ec_store.counts import after_fork
from ec_store.redis.url import Address, RedisOptions

T = TypeVar("T")
R = TypeVar("R")

Piece = bytes | memoryview
Argument = str | int | Piece | tuple[Piece, ...]
"""A tuple is one argument in several pieces, which are sent without joining them."""

Command = tuple[Argument, ...]
"""Name of the command, its key, and further arguments."""

Reply = Any

JOIN_BYTES = 64 * 1024
"""Largest piece in bytes that is joined with others before sending: copying costs less than a
system call."""

RECEIVE_BYTES = 64 * 1024

LINE_BYTES = 64
"""Bytes received at a time while reading the length of a value; they may include its first
bytes."""

MAX_IDLE = 16
"""Upper bound of the idle connections kept for one server."""

_NOTHING: Final = object()
"""Return value of hiredis if no reply is complete."""

_ERRORS: Final = {
    "ASK": redis.exceptions.AskError,
    "CLUSTERDOWN": redis.exceptions.ClusterDownError,
    "LOADING": redis.BusyLoadingError,
    "MASTERDOWN": redis.exceptions.MasterDownError,
    "MOVED": redis.exceptions.MovedError,
    "NOAUTH": redis.AuthenticationError,
    "OOM": redis.OutOfMemoryError,
    "READONLY": redis.ReadOnlyError,
    "TRYAGAIN": redis.exceptions.TryAgainError,
    "WRONGPASS": redis.AuthenticationError,
}


def reply_error(text: str) -> redis.RedisError:
    """Return the error of an error reply, by its first word."""
    code, _, rest = text.partition(" ")
    kind = _ERRORS.get(code)
    return kind(rest) if kind else redis.ResponseError(text)


class RedisConnection:
    """Connection, reusable exactly when `owed`, the number of pending replies, is 0.

    All sends and receives end by `deadline_s` of the monotonic clock.
    """

    def __init__(self, sock: socket.socket, deadline_s: float, generation: int) -> None:
        self._sock = sock
        self.deadline_s = deadline_s
        self._reader = hiredis.Reader(
            replyError=reply_error, protocolError=redis.InvalidResponse, notEnoughData=_NOTHING
        )
        self._ahead = bytearray()
        self.owed = 0
        self.generation = generation

    @property
    def open(self) -> bool:
        """Return whether it has a socket.

        An interrupted call can become garbage in a cycle. Then the socket may be closed before or
        after the end of the call returns the connection to its node.
        """
        return self._sock.fileno() >= 0

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands without waiting for replies."""
        self.owed += len(commands)
        for piece in pack_commands(commands):
            left = memoryview(piece).cast("B")
            while left:
                left = left[self._call_in_time(self._sock.send, left) :]

    def read(self) -> Reply:
        """Return the next reply; an error reply is returned, not raised."""
        while (reply := self._reader.gets()) is _NOTHING:
            self._reader.feed(self._received(RECEIVE_BYTES))
        return self._read(reply)

    def read_into(self, room: memoryview) -> Reply:
        """Receive the next reply, a value, into `room`, and return its length in bytes.

        The value is received into its final buffer. hiredis would make bytes of it, through two
        buffers of its own, at two thirds of the speed. Replies that were requested together are all
        read like this, or none.

        Raises:
            redis.InvalidResponse: the value is longer than `room`.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return self._read(reply_error(rest.decode(errors="replace")))
        if kind != b"$" or not rest.isdigit() or int(rest) > len(room):
            raise redis.InvalidResponse(f"not a value of at most {len(room)} bytes: {line!r}")
        self._receive(room[: int(rest)])
        self._receive(memoryview(bytearray(2)))
        return self._read(int(rest))

    def _read(self, reply: Reply) -> Reply:
        """Count a reply as read; raise it if it is an error that ends the connection."""
        if isinstance(reply, redis.ConnectionError):
            raise reply
        self.owed -= 1
        return reply

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            self._ahead += self._received(LINE_BYTES)
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line

    def _receive(self, room: memoryview) -> None:
        done = min(len(room), len(self._ahead))
        room[:done] = self._ahead[:done]
        del self._ahead[:done]
        while done < len(room):
            done += _check_not_closed(self._call_in_time(self._sock.recv_into, room[done:]))

    def _received(self, size: int) -> bytes:
        return _check_not_closed(self._call_in_time(self._sock.recv, size))

    def _call_in_time(self, call: Callable[[T], R], argument: T) -> R:
        """Send or receive some bytes before the deadline."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise redis.TimeoutError("the server did not answer in time")
        try:
            self._sock.settimeout(left_s)
            return call(argument)
        except TimeoutError:
            raise redis.TimeoutError("the server did not answer in time") from None
        except OSError as error:
            raise redis.ConnectionError(f"the connection broke: {error}") from None

    def close(self) -> None:
        self._sock.close()


def _check_not_closed(received: R) -> R:
    if not received:
        raise redis.ConnectionError("the server closed the connection")
    return received


def pack_commands(commands: Sequence[Command]) -> list[Piece]:
    """Return the bytes of commands to send: small pieces joined, large ones as they are."""
    pieces: list[Piece] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            parts = argument if isinstance(argument, tuple) else (_encoded(argument),)
            small += b"$%d\r\n" % sum(map(len, parts))
            for part in parts:
                if len(part) <= JOIN_BYTES:
                    small += part
                else:
                    pieces += (bytes(small), part)
                    small.clear()
            small += b"\r\n"
    return [*pieces, bytes(small)]


def _encoded(argument: str | int | Piece) -> Piece:
    if isinstance(argument, bytes | memoryview):
        return argument
    return str(argument).encode()


class Node:
    """Server and its idle connections. Safe for threads and after forks."""

    def __init__(self, address: Address, options: RedisOptions) -> None:
        self.address = address
        self._options = options
        # A deque needs no lock, which a fork could leave locked.
        self._idle: deque[RedisConnection] = deque()
        self._generation = 0
        self._closed = False
        after_fork(self._forget_parent)
        self.failed_s = 0.0
        """Time of the last failed or aborted call, by the monotonic clock."""

    @contextmanager
    def connection(self, deadline_s: float, *, keep: bool = True) -> Iterator[RedisConnection]:
        """Open a context with an exclusive connection.

        It is kept after the context if every reply was read, unless `keep` is false.
        """
        try:
            connection = self._take(deadline_s)
        except redis.RedisError:
            self.failed_s = time.monotonic()
            raise
        try:
            yield connection
        finally:
            if connection.owed:
                self.failed_s = time.monotonic()
            if connection.owed or not keep:
                connection.close()
            else:
                self._keep(connection)

    def close(self) -> None:
        """Close the idle connections, and those in use at the end of their calls."""
        self._closed = True
        self.close_connections()

    def close_connections(self) -> None:
        """Close all connections, those in use after their calls: they may lead to an old server."""
        self._generation += 1
        with suppress(IndexError):  # another thread has taken the last one
            while self._idle:
                self._idle.pop().close()

    def _keep(self, connection: RedisConnection) -> None:
        # Appended before the check: a `close` or `close_connections` after the check finds it.
        self._idle.append(connection)
        if self._closed or connection.generation != self._generation or len(self._idle) > MAX_IDLE:
            with suppress(ValueError):  # another thread has taken or closed it
                self._idle.remove(connection)
                connection.close()

    def _take(self, deadline_s: float) -> RedisConnection:
        generation = self._generation
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._connect(deadline_s, generation)
            if connection.open:
                connection.deadline_s = deadline_s
                return connection

    def _forget_parent(self) -> None:
        """Drop the connections of the parent, in a child of `fork`."""
        self._idle = deque()

    def _connect(self, deadline_s: float, generation: int) -> RedisConnection:
        sock = _connected(self.address, self._options, deadline_s)
        try:
            connection = RedisConnection(sock, deadline_s, generation)
            _authenticate(connection, self._options)
        except BaseException:
            sock.close()
            raise
        return connection


def _connected(address: Address, options: RedisOptions, deadline_s: float) -> socket.socket:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise redis.TimeoutError("no time was left to connect")
    try:
        sock = socket.create_connection(
            (address.host, address.port), min(options.connect_timeout_s, left_s)
        )
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _secured(sock, address, options)
        except BaseException:
            sock.close()
            raise
    except TimeoutError:
        raise redis.TimeoutError("the server did not accept a connection in time") from None
    except (OSError, UnicodeError) as error:
        raise redis.ConnectionError(f"no connection: {error}") from None


def _secured(sock: socket.socket, address: Address, options: RedisOptions) -> socket.socket:
    """Return the socket, with TLS if configured. Certificates are read for each connection."""
    tls = options.tls
    if tls is None:
        return sock
    context = ssl.create_default_context(cafile=tls.ca_certs)
    if tls.certfile is not None:
        context.load_cert_chain(tls.certfile, tls.keyfile)
    return context.wrap_socket(sock, server_hostname=address.host)


def _authenticate(connection: RedisConnection, options: RedisOptions) -> None:
    password = options.password
    if options.password_file is not None:
        try:
            password = options.password_file.read_text().strip()
        except (OSError, UnicodeError) as error:
            raise redis.ConnectionError(f"the password file cannot be read: {error}") from None
    commands: list[Command] = []
    if password is not None:
        user = () if options.username is None else (options.username,)
        commands.append(("AUTH", *user, password))
    if options.db:
        commands.append(("SELECT", options.db))
    connection.send(commands)
    for _ in commands:
        reply = connection.read()
        if isinstance(reply, redis.ResponseError):
            raise redis.AuthenticationError(str(reply))
