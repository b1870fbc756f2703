"""Connection of a process to the server of an arena, for callers that wait for each reply."""

import array
import errno
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from ec_store.arena.extents import Extent
from ec_store.arena.memory import Bytes, map_memory, parts_of, populate
from ec_store.arena.protocol import (
    MAX_REPLY_BYTES,
    VERSION,
    ArenaRequest,
    BadMessage,
    Begun,
    Failed,
    Forget,
    Frames,
    Hello,
    Message,
    Pins,
    Reply,
    Role,
    Unpin,
    Welcome,
    encode,
    read_reply,
)
from ec_store.arena.sockets import check_folder
from ec_store.counts import ForkLock, after_fork
from ec_store.errors import CorruptEntry, StoreUnavailable

CHUNK_BYTES = 2**16  # larger ones are mapped and unmapped for each call
MAX_WELCOME_BYTES = 2**16
NAME_BYTES = 16

MAX_RELEASES = 1024
"""Upper bound of the pins that are released at once, so that a socket has room for the message."""

R = TypeVar("R", bound=Message)


class MappedArena:
    """Memory of one server, mapped in this process by one connection.

    It stays mapped while the connection lasts or a view of it exists.

    Attributes:
        socket: the connection.
        name, session, segment_bytes, address, tier: as in `Welcome`.
        memory: its bytes; empty for a proxy, and after the connection was lost.
        released: pins of entries that are no longer read here. A finalizer may append to it within
            any other call of its thread, so there is no lock.
        pins: number of pins since the beginning that have not been sent as released.
        writes: begun writes into which bytes may be copied now.
    """

    def __init__(
        self,
        connection: socket.socket,
        welcome: Welcome,
        fds: Sequence[int],
        role: Role,
        mapped: "MappedMemories",
    ) -> None:
        """Map the memory unless it is among the mapped ones, and leave its descriptor open.

        Raises:
            BadMessage: the server has sent no memory.
            OSError: the memory cannot be mapped.
        """
        if len(welcome.arena) != NAME_BYTES or welcome.segment_bytes <= 0:
            raise BadMessage("the server describes no memory")
        self.socket = connection
        self.name, self.session = welcome.arena, welcome.session
        self.segment_bytes = welcome.segment_bytes
        self.address, self.tier = welcome.address, welcome.tier
        self.released: deque[int] = deque()
        self.pins = 0
        self.writes: set[int] = set()
        self.lost = False
        self.memory: Bytes = np.empty(0, np.uint8)
        if role != "proxy":
            if len(fds) != 1:
                raise BadMessage("the server has sent no memory")
            memory = mapped.get(self.name)
            if memory is None or len(memory) != welcome.size_bytes:
                memory = map_memory(fds[0], welcome.size_bytes, write=role == "writer")
                mapped[self.name] = memory
                with suppress(RuntimeError):  # no thread can be started
                    populate(memory, write=role == "writer")
            self.memory = memory

    @property
    def unused(self) -> bool:
        """Return whether nothing is read or written here any more."""
        return not self.writes and self.pins == len(self.released)

    def parts(self, extents: Sequence[Extent], size_bytes: int) -> list[Bytes]:
        """Return the bytes of an entry of this size, in order.

        Raises:
            CorruptEntry: the extents are not in the memory, or too small.
            StoreUnavailable: the connection was lost.
        """
        if self.lost:
            raise StoreUnavailable("the connection to the arena was lost")
        try:
            return parts_of(self.memory, extents, size_bytes)
        except ValueError as error:
            raise CorruptEntry(str(error)) from None

    def unmap(self) -> None:
        """Unmap the memory after the last view of it is deleted: the connection was lost."""
        self.lost = True
        self.memory = np.empty(0, np.uint8)


MappedMemories = weakref.WeakValueDictionary[bytes, Bytes]
"""Memories that are mapped, by name: a new connection to the same server maps none again."""


class ArenaConnection:
    """Connection that is made at the first call, and again after a failure. Thread-safe.

    After a fork the child connects itself: what a client holds belongs to one process.

    Attributes:
        arena: the memory of the connection; None while it is lost.
    """

    def __init__(self, path: str, role: Role, timeout_s: float) -> None:
        """Create a connection to the server at a path. Each call may take `timeout_s`."""
        self._path = path
        self._role: Role = role
        self._timeout_s = timeout_s
        self._lock = ForkLock()
        self._socket: socket.socket | None = None
        self.arena: MappedArena | None = None
        self._earlier: list[MappedArena] = []
        self._mapped: MappedMemories = MappedMemories()
        after_fork(self._forget_parent)

    def call(
        self, request: ArenaRequest[R], *, within: MappedArena | None = None
    ) -> tuple[R, MappedArena]:
        """Send a request; return its reply, and the memory that the reply refers to.

        Args:
            request: the request.
            within: memory that the request refers to; None: it refers to none.

        Raises:
            StoreUnavailable: there is no server, it is too slow, its reply is unusable, or it is
                another one than `within` belongs to. The next call connects again.
        """
        deadline_s = time.monotonic() + self._timeout_s
        with self._lock.mutex:
            now_s = time.monotonic()
            if within is not None:
                if within is not self.arena:
                    raise StoreUnavailable(f"{self._path}: the connection to the arena was lost")
                deadline_s = now_s + self._timeout_s  # what the server holds must end, however late
            elif now_s >= deadline_s:
                raise StoreUnavailable(f"the arena at {self._path}: other calls took all the time")
            try:
                arena, reply = self._exchange(request, deadline_s, within)
            except (OSError, BadMessage) as error:
                self._disconnect()
                raise StoreUnavailable(f"the arena at {self._path}: {error}") from error
            except BaseException:  # a signal: the reply would be taken for that of the next request
                self._disconnect()
                raise
            if isinstance(reply, Pins):
                arena.pins += sum(pin.number > 0 for pin in reply.pins)
            elif isinstance(reply, Begun) and reply.number:
                arena.writes.add(reply.number)
        if arena.released:
            self._send_releases(arena)
        return reply, arena

    def release(self, arena: MappedArena, number: int) -> None:
        """Release a pin; a finalizer may call it, within any other call of its thread.

        So it waits neither for a lock nor for the server. If a call is under way, the release is
        sent at its end.
        """
        arena.released.append(number)
        self._send_releases(arena)

    def _send_releases(self, arena: MappedArena) -> None:
        while arena.released and self._lock.mutex.acquire(blocking=False):
            try:
                if arena is not self.arena:
                    return  # it was lost, and the next connection reports the end of its copies
                if not _has_event(arena.socket, select.POLLOUT):
                    return  # the server does not read: the next call sends them, or fails
                _send(arena.socket, _unpin(arena), time.monotonic() + self._timeout_s)
            except OSError:
                self._disconnect()
            finally:
                self._lock.mutex.release()

    def settle(self) -> None:
        """Send the releases of pins, which otherwise wait for the next call.

        Disconnect if the server has closed the connection: its memory is unmapped.
        """
        with self._lock.mutex:
            arena = self.arena
            if arena is not None and _has_event(arena.socket, select.POLLRDHUP):
                self._disconnect()
        if arena is not None:
            self._send_releases(arena)

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes that are mapped, earlier memories that are still read included."""
        memories = [reference() for reference in self._mapped.valuerefs()]
        return sum(len(memory) for memory in memories if memory is not None)

    def close(self) -> None:
        """Close the connection; the server frees what it held.

        Entries that are still read here stay until this process ends.
        """
        if (arena := self.arena) is not None:
            self._send_releases(arena)
        with self._lock.mutex:
            self._disconnect()

    def _connect(self, deadline_s: float) -> MappedArena:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = connection
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        try:
            check_folder(Path(self._path).parent)
            connection.connect(self._path)
        except FileNotFoundError:
            text = "no such socket; of another container, its folder must be mounted into this one"
            raise FileNotFoundError(errno.ENOENT, text) from None
        connection.sendall(encode(Hello(VERSION, self._role)))
        data, fds = _receive_fds(connection)
        connection.setblocking(False)  # with a time-out, Python makes twice as many system calls
        try:
            reply = _receive(connection, data, deadline_s)
            if isinstance(reply, Failed):
                raise BadMessage(reply.text)
            self.arena = MappedArena(
                connection, _expect(reply, Welcome), fds, self._role, self._mapped
            )
        finally:
            for fd in fds:
                os.close(fd)
        return self.arena

    def _exchange(
        self, request: ArenaRequest[R], deadline_s: float, within: MappedArena | None
    ) -> tuple[MappedArena, R]:
        try:
            arena = self._send_request(request, deadline_s)
        except BrokenPipeError:  # the server has ended since the last call
            if within is not None:
                raise
            self._disconnect()
            arena = self._send_request(request, deadline_s)
        reply = _receive(arena.socket, b"", deadline_s)
        return arena, cast("R", _expect(reply, request.reply_type))

    def _send_request(self, request: ArenaRequest[R], deadline_s: float) -> MappedArena:
        arena = self.arena or self._connect(deadline_s)
        if self._earlier:
            self._report_copies(arena, deadline_s)
        data = encode(request)
        if arena.released:
            data = _unpin(arena) + data
        _send(arena.socket, data, deadline_s)
        return arena

    def _report_copies(self, arena: MappedArena, deadline_s: float) -> None:
        """Tell the server that the copies of lost connections have ended."""
        for earlier in [earlier for earlier in self._earlier if earlier.unused]:
            if earlier.name == arena.name:
                _send(arena.socket, encode(Forget(earlier.session)), deadline_s)
                _receive(arena.socket, b"", deadline_s)
            self._earlier.remove(earlier)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self.arena is not None:  # its last reply, which is lost, may have pinned or begun
            self.arena.unmap()
            self._earlier.append(self.arena)
        self._socket = self.arena = None

    def _forget_parent(self) -> None:
        """Drop what belongs to the parent process, in a child of `fork`."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self.arena = None
        self._earlier = []
        self._mapped = MappedMemories()


def _has_event(connection: socket.socket, event: int, deadline_s: float = 0.0) -> bool:
    """Return whether a socket has an event, at once or until a deadline."""
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))))


def _send(connection: socket.socket, data: bytes, deadline_s: float) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except BlockingIOError:
            if not _has_event(connection, select.POLLOUT, deadline_s):
                raise TimeoutError("timed out") from None


def _receive_fds(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return received bytes, and the descriptors that came with them, which no child inherits.

    Python's `recv_fds` ignores its flags: a program that another thread starts at this moment would
    inherit the memory.
    """
    fds = array.array("i")
    room = socket.CMSG_SPACE(fds.itemsize)
    data, controls, _, _ = connection.recvmsg(MAX_WELCOME_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, control in controls:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(control[: len(control) - len(control) % fds.itemsize])
    return data, list(fds)


def _expect(reply: Reply, reply_type: type[R]) -> R:
    if not isinstance(reply, reply_type):
        raise BadMessage(f"an unexpected reply: {reply!r:.200}")
    return reply


def _unpin(arena: MappedArena) -> bytes:
    numbers: list[int] = []
    while arena.released and len(numbers) < MAX_RELEASES:
        numbers.append(arena.released.popleft())
    arena.pins -= len(numbers)
    return encode(Unpin(numbers))


def _receive(connection: socket.socket, data: bytes, deadline_s: float) -> Reply:
    """Return the next reply; `data` is its beginning.

    At most one reply is on its way, so all bytes that arrive belong to it.
    """
    frames = Frames(MAX_REPLY_BYTES)
    while not (bodies := list(frames.split(data))):
        if not _has_event(connection, select.POLLIN, deadline_s):
            raise TimeoutError("timed out")
        data = connection.recv(CHUNK_BYTES)
        if not data:
            raise BadMessage("the server has closed the connection")
    if len(bodies) > 1 or frames.rest:
        raise BadMessage("bytes after a reply")
    return read_reply(bodies[0])
