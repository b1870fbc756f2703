"""Pipelined commands to Redis: to one server, or to the nodes of a cluster.

Retries and routing are implemented here. Those of redis-py repeat commands that have timed out, and
need commands that a narrow ACL user may not run.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import redis
from redis.crc import key_slot

from ec_store.errors import StoreUnavailable
from ec_store.redis.connection import Command, Node, RedisConnection, Reply
from ec_store.redis.url import Address, RedisOptions

MAX_PENDING = 4
"""Upper bound of the pending replies of a node that go into buffers: enough to keep its connection
busy, and a bound on the memory that the server holds for a client, which counts towards
`maxmemory`."""

MOST_MOVES = 5
"""Upper bound of the moves to other nodes that one call follows."""


_FAILING_OVER = (
    redis.BusyLoadingError,
    redis.ReadOnlyError,
    redis.exceptions.MovedError,
    redis.exceptions.AskError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
    redis.exceptions.MasterDownError,
)


class Refused(StoreUnavailable):
    """Error of a server that answers but cannot serve: loading, failing over, out of memory."""


class OutOfMemory(Refused):
    """Error of a server that rejects writes: `maxmemory` is reached and nothing is evictable."""


class RedisClient:
    """Client that runs each command on the node of its key, and retries a failure once."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._nodes = {address: Node(address, options) for address in options.addresses}
        self._only = None if options.cluster else self._nodes[options.addresses[0]]
        self._slots: list[Node | None] = []
        self._bound = _Bound()
        self._closed = False

    @contextmanager
    def limit_time(self) -> Iterator[None]:
        """Limit all calls of this thread in the context to the timeout of one call."""
        self._bound.deadline_s = time.monotonic() + self._options.timeout_s
        try:
            yield
        finally:
            self._bound.deadline_s = None

    @contextmanager
    def close_after_calls(self) -> Iterator[None]:
        """Close the connections of this thread's calls in the context after each call.

        A server keeps a buffer of the size of the largest value for each connection that has sent
        it, for some seconds.
        """
        self._bound.keep = False
        try:
            yield
        finally:
            self._bound.keep = True

    def run(
        self,
        commands: Sequence[Command],
        *,
        node: Node | None = None,
        into: Sequence[memoryview] | None = None,
    ) -> list[Reply]:
        """Run commands, and return their replies in order.

        If a connection breaks or the server is failing over, the commands without a reply are sent
        once more, over new connections. Commands that have timed out are not. Moved keys are
        followed. The whole call, connecting included, takes at most `timeout_s`. A `WRONGTYPE`
        error counts as an empty value.

        Args:
            commands: commands, sent to each node at once: one round trip.
            node: node of all commands; None: that of each command's key.
            into: buffers for the values that the commands return, which may be large; each reply is
                the length then, and at most `MAX_PENDING` are pending.

        Raises:
            Refused: a server could not serve now.
            StoreUnavailable: a server could not be reached.
        """
        if not commands:
            return []
        replies: dict[int, Reply] = {}
        target, deadline_s = node or self._only, self._deadline_s()
        moves = failures = 0
        while True:
            todo = {
                number: command for number, command in enumerate(commands) if number not in replies
            }
            problem = self._round(todo, replies, target, into, deadline_s)
            if problem is None:
                return [replies[number] for number in range(len(commands))]
            if isinstance(problem, redis.exceptions.AskError):
                moves += 1
            else:
                failures += 1
            if moves > MOST_MOVES or failures > 1 or not _is_retryable(problem):
                raise _translated(problem, target) from None

    def each_master(self, command: Command) -> list[tuple[Node, Reply]]:
        """Return each master with its reply to a command without a key."""
        if self._only is not None:
            nodes = [self._only]
        else:  # the present map may lack a node that this process has not used
            try:
                slots = self._loaded(self._deadline_s())
            except redis.RedisError as error:
                raise _translated(error) from None
            nodes = list(dict.fromkeys(node for node in slots if node))
        return [(node, self.run([command], node=node)[0]) for node in nodes]

    def scan(self, pattern: bytes, count: int) -> Iterator[list[bytes]]:
        """Yield names of keys in batches, some more than once.

        Scans all keys of each master, `count` in one step.
        """
        rest = ("MATCH", pattern, "COUNT", count)
        for node, first in self.each_master(("SCAN", 0, *rest)):
            reply = first
            yield reply[1]
            while int(reply[0]):
                [reply] = self.run([("SCAN", reply[0], *rest)], node=node)
                yield reply[1]

    def close(self) -> None:
        """Close connections; one in use is closed at the end of its call."""
        self._closed = True
        for node in list(self._nodes.values()):
            node.close()

    def _deadline_s(self) -> float:
        bound = self._bound.deadline_s
        return time.monotonic() + self._options.timeout_s if bound is None else bound

    def _round(
        self,
        commands: Mapping[int, Command],
        replies: dict[int, Reply],
        target: Node | None,
        into: Sequence[memoryview] | None,
        deadline_s: float,
    ) -> redis.RedisError | None:
        """Send commands to all nodes, then read the replies; return the worst error, if any."""
        try:
            groups = self._routed(commands, target, deadline_s)
        except redis.RedisError as error:
            self._slots = []
            return error
        window = MAX_PENDING if into else len(commands)
        problems: list[redis.RedisError] = []
        with ExitStack() as stack:
            sent: list[tuple[Node, RedisConnection, list[int]]] = []
            for node, numbers in groups:
                try:
                    connection = stack.enter_context(
                        node.connection(deadline_s, keep=self._bound.keep)
                    )
                    connection.send([commands[number] for number in numbers[:window]])
                except redis.RedisError as error:
                    problems.append(self._failed(node, error))
                else:
                    sent.append((node, connection, numbers))
            for node, connection, numbers in sent:
                try:
                    for place, number in enumerate(numbers):
                        room = into[number] if into else None
                        reply = connection.read() if room is None else connection.read_into(room)
                        if place + window < len(numbers):
                            connection.send([commands[numbers[place + window]]])
                        try:
                            replies[number] = self._check_reply(
                                commands[number], reply, room, deadline_s
                            )
                        except redis.RedisError as error:
                            problems.append(self._failed(node, error))
                except redis.RedisError as error:
                    problems.append(self._failed(node, error))
        # The next round finds moved keys; any other error takes precedence.
        problems.sort(key=lambda problem: isinstance(problem, redis.exceptions.AskError))
        return problems[0] if problems else None

    def _check_reply(
        self, command: Command, reply: Reply, room: memoryview | None, deadline_s: float
    ) -> Reply:
        """Check a reply; if the slot is moving, return the reply of the key's new node."""
        if type(reply) is not redis.exceptions.AskError:
            return _checked(reply)
        node = self._node(Address(reply.host, reply.port))
        value = _checked(self._exchange(node, [("ASKING",), command], deadline_s)[1])
        if room is None:
            return value
        room[: len(value)] = value[: len(room)]
        return len(value)

    def _failed(self, node: Node, error: redis.RedisError) -> redis.RedisError:
        """Drop the routes and connections that an error shows to be outdated; return the error."""
        if isinstance(error, redis.exceptions.MovedError):
            # An empty host stands for the node that answered.
            address = Address(error.host or node.address.host, error.port)
            if slots := self._slots:
                slots[error.slot_id] = self._node(address)
        elif _is_stale(error):
            node.close_connections()
            self._slots = []
        return error

    @staticmethod
    def _exchange(node: Node, commands: Sequence[Command], deadline_s: float) -> list[Reply]:
        with node.connection(deadline_s) as connection:
            connection.send(commands)
            return [connection.read() for _ in commands]

    def _routed(
        self, commands: Mapping[int, Command], target: Node | None, deadline_s: float
    ) -> list[tuple[Node, list[int]]]:
        if target is not None:
            return [(target, list(commands))]
        # A local reference: another thread may replace the map meanwhile.
        slots = self._slots or self._loaded(deadline_s)
        groups: dict[Node, list[int]] = {}
        for number, command in commands.items():
            node = slots[key_slot(cast("bytes", command[1]))]
            if node is None:
                raise redis.exceptions.ClusterDownError("a slot has no node")
            groups.setdefault(node, []).append(number)
        return list(groups.items())

    def _loaded(self, deadline_s: float) -> list[Node | None]:
        problem: redis.RedisError = redis.ConnectionError("no node is known")
        for node in sorted(self._nodes.values(), key=lambda node: node.failed_s):
            # Less than the whole deadline: if one node hangs, the next one has the map too.
            until_s = min(deadline_s, time.monotonic() + self._options.connect_timeout_s)
            try:
                ranges = _checked(self._exchange(node, [("CLUSTER", "SLOTS")], until_s)[0])
            except redis.RedisError as error:
                problem = error
                continue
            slots: list[Node | None] = [None] * 16384
            for first, last, master, *_ in ranges:
                # An empty host stands for the queried node.
                host = (master[0] or b"").decode() or node.address.host
                owner = self._node(Address(host, master[1]))
                slots[first : last + 1] = [owner] * (last + 1 - first)
            self._slots = slots
            return slots
        raise problem

    def _node(self, address: Address) -> Node:
        node = self._nodes.setdefault(address, Node(address, self._options))
        if self._closed:
            node.close()
        return node


class _Bound(threading.local):
    """Limits of this thread's calls.

    Attributes:
        deadline_s: deadline inside `limit_time`; None outside.
        keep: whether connections stay open, which they do not inside `close_after_calls`.
    """

    deadline_s: float | None = None
    keep: bool = True


def _checked(reply: Reply) -> Reply:
    if isinstance(reply, redis.ResponseError):
        if str(reply).startswith("WRONGTYPE"):
            return b""
        raise reply
    return reply


def _is_stale(error: redis.RedisError) -> bool:
    kinds = (*_FAILING_OVER, redis.ConnectionError, redis.TimeoutError)
    return isinstance(error, kinds) and not isinstance(error, redis.exceptions.AskError)


def _is_retryable(error: redis.RedisError) -> bool:
    return isinstance(error, (*_FAILING_OVER, redis.ConnectionError)) and not isinstance(
        error, redis.AuthenticationError
    )


def _translated(error: redis.RedisError, node: Node | None = None) -> StoreUnavailable:
    text = f"{node.address}: {error}" if node else str(error)
    if isinstance(error, redis.OutOfMemoryError):
        return OutOfMemory(f"Redis is full: {text}")
    if isinstance(error, _FAILING_OVER):
        return Refused(f"Redis cannot serve now: {text}")
    return StoreUnavailable(f"Redis: {text}")
