"""Bytes that no client sends: they end their own connection, and nothing else."""

import socket
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ec_store.arena.protocol import (
    LENGTH_BYTES,
    MAX_REPLY_BYTES,
    VERSION,
    AnyRequest,
    BadMessage,
    Begin,
    Begun,
    ClaimKeys,
    Delete,
    Discard,
    End,
    Find,
    Forget,
    Frames,
    GetStats,
    Hello,
    List,
    Read,
    Register,
    Release,
    Unpin,
    Welcome,
    encode,
    read_reply,
    read_request,
)
from ec_store.arena.store import ArenaStore
from ec_store.testing.stores import assert_same, key, sized
from tests.ec_store.arena.served import until

OTHER = bytes(32)
BEGIN = encode(Begin(OTHER, b"", 100, False))
HELLO = encode(Hello(VERSION, "writer"))
REQUESTS: tuple[AnyRequest, ...] = (
    Hello(VERSION, "writer"),
    Forget(7),
    Find([OTHER], 1.0),
    Read([OTHER]),
    Unpin([1, 2]),
    Begin(OTHER, b"", 100, False),
    End(1, b"header"),
    Discard(1),
    Delete([OTHER]),
    ClaimKeys([OTHER], b"owner", 0.01),
    Release([OTHER], b"owner"),
    List(b""),
    Register(b"model", b"namespace"),
    GetStats(),
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)
"""Values of MessagePack."""


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Bytes after a first request: requests, of which one is spoiled."""
    parts = [encode(draw(st.sampled_from(REQUESTS))) for _ in range(draw(st.integers(0, 3)))]
    request = encode(draw(st.sampled_from(REQUESTS)))
    place = draw(st.integers(0, len(request) - 1))
    name, *fields = msgspec.msgpack.decode(request[4:])
    values = draw(st.lists(VALUES, min_size=len(fields), max_size=len(fields) + 1))
    spoiled = [
        request[:place],
        request[:place] + draw(st.binary(min_size=1, max_size=1)) + request[place + 1 :],
        framed(msgspec.msgpack.encode([name, *values])),
        framed(draw(st.binary(max_size=40))),
        draw(st.binary(max_size=40)),
    ]
    return b"".join([*parts, draw(st.sampled_from(spoiled))])


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(path))
    return connection


def greet(connection: socket.socket) -> int:
    """Send the first request; return the number of the connection."""
    connection.sendall(HELLO)
    welcome = read_reply(connection.recv(2**16)[4:])
    assert isinstance(welcome, Welcome)
    return welcome.session


@pytest.mark.fault(126)
@given(stream=streams(), greeted=st.booleans())
@example(stream=HELLO + BEGIN, greeted=False)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_bytes_that_no_client_sends_end_their_connection_alone(
    path: Path, store: ArenaStore, stream: bytes, greeted: bool
) -> None:
    assert store.put(key(), sized(100), replace=True)
    found = store.get(key())
    with connected(path) as connection:
        session, received = greet(connection) if greeted else 0, b""
        with suppress(ConnectionError):  # it may have been closed already
            connection.sendall(stream)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(2**16):
                received += data
    for reply in map(read_reply, Frames(MAX_REPLY_BYTES).split(received)):
        if isinstance(reply, Welcome):  # the stream begins with a first request
            session = reply.session

    assert_same(sized(100), found)
    assert_same(sized(100), store.get(key()))
    del found
    store._ask(Forget(session))  # noqa: SLF001 - as this process, which lives, would report
    until(path, clients=2, entries=1, begun_bytes=0, pinned_bytes=0, gone_bytes=0)


@pytest.mark.fault(126)
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_half_a_message_ends_with_its_connection(
    path: Path, store: ArenaStore, request_: Begin
) -> None:
    message = encode(request_)
    for size in range(1, len(message)):
        with connected(path) as connection:
            session = greet(connection)
            connection.sendall(BEGIN)
            assert isinstance(read_reply(connection.recv(2**16)[4:]), Begun)
            connection.sendall(message[:size])
        store._ask(Forget(session))  # noqa: SLF001
    until(path, clients=2, begun_bytes=0, gone_bytes=0)


def test_text_that_is_no_utf8_is_no_request() -> None:
    body = encode(Hello(version=VERSION, role="reader", key="secret"))[LENGTH_BYTES:]
    assert read_request(body) == Hello(version=VERSION, role="reader", key="secret")

    with pytest.raises(BadMessage, match="utf-8"):
        read_request(body.replace(b"secret", b"secre\xc1"))
