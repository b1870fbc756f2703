"""Client of a Redis cluster with moving slots, tested with fake nodes that count their commands."""

import socketserver
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import hiredis
import pytest
from redis.crc import key_slot

from ec_store import EntryKey, StoreUnavailable
from ec_store.redis.client import MOST_MOVES
from ec_store.redis.store import RedisStore
from ec_store.testing.stores import key

NODES = 3
SLOTS = 16384


class FakeCluster:
    """Fake cluster nodes that own slots and store nothing.

    Attributes:
        owner: number of the node that serves each slot.
        known: owner of each slot according to `CLUSTER SLOTS`; -1: no owner.
        hints: node that a node's redirection names for a slot, if it is not the owner.
        connections: number of connections accepted by each node.
        served: number of commands answered by each node, without `CLUSTER SLOTS`.
        maps: number of answers to `CLUSTER SLOTS`.
    """

    def __init__(self) -> None:
        self.owner = [0] * SLOTS
        self.known = [0] * SLOTS
        self.hints: dict[tuple[int, int], int] = {}
        self.connections: Counter[int] = Counter()
        self.served: Counter[int] = Counter()
        self.maps = 0
        self.ports: list[int] = []

    def reply(self, node: int, command: list[bytes]) -> bytes:
        if command[0] == b"CLUSTER":
            self.maps += 1
            return self._map()
        slot = key_slot(command[1])
        named = self.hints.get((node, slot), self.owner[slot])
        if named != node:
            return b"-MOVED %d 127.0.0.1:%d\r\n" % (slot, self.ports[named])
        self.served[node] += 1
        return b"$0\r\n\r\n"

    def _map(self) -> bytes:
        known = self.known
        starts = [n for n in range(SLOTS) if not n or known[n] != known[n - 1]]
        rows = [
            b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n"
            % (first, end - 1, self.ports[known[first]])
            for first, end in zip(starts, [*starts[1:], SLOTS], strict=True)
            if known[first] >= 0
        ]
        return b"*%d\r\n" % len(rows) + b"".join(rows)


def listening(cluster: FakeCluster, node: int) -> socketserver.ThreadingTCPServer:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            cluster.connections[node] += 1
            reader = hiredis.Reader(notEnoughData=None)
            while received := self.request.recv(65536):
                reader.feed(received)
                replies = b""
                while (command := reader.gets()) is not None:
                    replies += cluster.reply(node, command)
                self.request.sendall(replies)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    fake = FakeCluster()
    with ExitStack() as stack:
        for node in range(NODES):
            server = stack.enter_context(listening(fake, node))
            fake.ports.append(server.server_address[1])
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
        yield fake


@pytest.fixture
def store(cluster: FakeCluster) -> Iterator[RedisStore]:
    url = f"redis+cluster://127.0.0.1:{cluster.ports[0]}?timeout=30s&connect_timeout=30s"
    with RedisStore.from_url(url) as store:
        store.lookup([key()])
        yield store


def slot_of(one: EntryKey) -> int:
    return int(key_slot(f"{{{one.digest}}}".encode()))


def move(cluster: FakeCluster, one: EntryKey, node: int) -> None:
    """Move a slot without updating the answer to `CLUSTER SLOTS`."""
    cluster.owner[slot_of(one)] = node


@pytest.mark.fault(19)
def test_every_move_is_learnt_at_once_and_no_connection_is_closed(
    cluster: FakeCluster, store: RedisStore
) -> None:
    keys = [key(str(n)) for n in range(60)]
    for n, each in enumerate(keys):
        move(cluster, each, 1 + n % 2)
        store.lookup([each])
    moves = +cluster.served
    store.lookup(keys)

    assert cluster.maps == 1
    assert [cluster.connections[node] for node in range(NODES)] == [1, 1, 1]
    assert [(cluster.served - moves)[node] for node in range(NODES)] == [0, 30, 30]


@pytest.mark.fault(19)
@pytest.mark.parametrize("moves", [2, MOST_MOVES])
def test_a_slot_that_moves_within_a_call_is_followed(
    cluster: FakeCluster, store: RedisStore, moves: int
) -> None:
    ways = iter([(n + 1) % NODES for n in range(moves)])
    last = moves % NODES
    reply = cluster.reply

    def moving(node: int, command: list[bytes]) -> bytes:
        if command[0] == b"GETRANGE":
            cluster.owner[slot_of(key())] = next(ways, last)
        return reply(node, command)

    cluster.reply = moving  # type: ignore[method-assign]

    assert store.lookup([key(), key("other")]) == [None, None]


def test_a_slot_that_has_no_node_is_not_followed_for_ever(
    cluster: FakeCluster, store: RedisStore
) -> None:
    slot = slot_of(key())
    cluster.hints = {(node, slot): (node + 1) % NODES for node in range(NODES)}
    before: Any = +cluster.served

    with pytest.raises(StoreUnavailable, match="cannot serve now"):
        store.lookup([key()])
    assert cluster.served == before
    assert store.lookup([key("other")]) == [None]


@pytest.mark.fault(19)
def test_a_node_that_closes_its_connections_costs_the_others_none(
    cluster: FakeCluster, store: RedisStore
) -> None:
    keys = [key(str(n)) for n in range(30)]
    for n, each in enumerate(keys):
        cluster.owner[slot_of(each)] = cluster.known[slot_of(each)] = n % NODES
    store.lookup(keys)
    reply, broken = cluster.reply, iter([True])

    def breaking(node: int, command: list[bytes]) -> bytes:
        if node == 1 and command[0] == b"GETRANGE" and next(broken, False):
            raise ConnectionResetError
        return reply(node, command)

    cluster.reply = breaking  # type: ignore[method-assign]
    store.lookup(keys)

    assert cluster.connections == {0: 1, 1: 2, 2: 1}


@pytest.mark.fault(19)
def test_a_slot_that_gets_a_node_is_found(cluster: FakeCluster) -> None:
    cluster.known = [-1] * 8192 + [0] * 8192
    one = next(each for n in range(99) if slot_of(each := key(str(n))) < 8192)
    with RedisStore.from_url(f"redis+cluster://127.0.0.1:{cluster.ports[0]}") as store:
        with pytest.raises(StoreUnavailable, match="no node"):
            store.lookup([one])
        cluster.known = [0] * SLOTS

        assert store.lookup([one]) == [None]
