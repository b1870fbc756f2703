from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.http.http1 import (
    MAX_HEAD_BYTES,
    Malformed,
    Origin,
    ReplyReader,
    request_head,
    target_of,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
BODY = b"0123456789\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"4\r\n0123\r\na;x=y\r\n456789\r\n\r\n\r\n0\r\nX-Trailer: 1\r\n\r\n"
WHOLE = {
    "of a length": OK + b"Content-Length: 14\r\n\r\n" + BODY,
    "in chunks": CHUNKED + CHUNKS,
    "after an interim one": b"HTTP/1.1 100 Continue\r\nX: 1\r\n\r\n" + CHUNKED + CHUNKS,
    "after two": b"HTTP/1.1 103 Early Hints\r\nX: 1\r\n\r\n" * 2 + CHUNKED + CHUNKS,
    "in lower case": CHUNKED.replace(b"Content-Type", b"content-type") + CHUNKS,
}


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if start < end]


def read(*pieces: bytes) -> ReplyReader:
    reader = ReplyReader()
    for piece in pieces:
        reader.feed(piece)
    return reader


@pytest.mark.parametrize("reply", WHOLE.values(), ids=WHOLE)
@given(places=st.lists(st.integers(0, 10_000), max_size=20), taken=st.integers(0, 20))
def test_an_answer_is_the_same_wherever_it_is_cut(
    reply: bytes, places: list[int], taken: int
) -> None:
    reader = ReplyReader()
    body = b""
    for number, piece in enumerate(cut(reply, places)):
        assert not reader.complete
        reader.feed(piece)
        if number >= taken:
            body += reader.take_body()
            assert reader.unread_bytes == 0

    assert (reader.status, reader.complete, reader.reusable) == (200, True, True)
    assert body + reader.take_body() == BODY
    assert {name.lower() for name in reader.headers} <= {
        *("content-type", "content-length", "transfer-encoding")
    }
    assert reader.headers["CONTENT-TYPE"] == "text/plain"


@pytest.mark.parametrize("reply", WHOLE.values(), ids=WHOLE)
def test_answers_follow_each_other(reply: bytes) -> None:
    reader = read(reply)
    for _ in range(2):
        reader.start_reply()
        assert (reader.begun, reader.status, reader.take_body()) == (False, 0, b"")
        reader.feed(reply)
        assert (reader.complete, reader.take_body()) == (True, BODY)


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"Connection: close\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        OK + b"Content-Length: 0\r\n\r\n" + OK,
        OK + b"Content-Length: 0\r\n\r\nnonsense",
    ],
)
def test_connection_is_not_reusable_after_these_answers(reply: bytes) -> None:
    reader = read(reply)

    assert (reader.status, reader.complete, reader.reusable) == (200, True, False)


@pytest.mark.parametrize("status", [204, 304])
def test_answers_with_status_204_and_304_have_no_body(status: int) -> None:
    assert read(b"HTTP/1.1 %d X\r\n\r\n" % status).complete


@pytest.mark.parametrize(
    ("reply", "complete"),
    [
        (OK + b"\r\nanything", True),
        (OK + b"\r\n", True),
        (OK + b"Content-Length: 5\r\n\r\n1234", False),
        (CHUNKED + b"4\r\n0123\r\n", False),
        (OK, False),
        (b"", False),
    ],
)
def test_the_end_of_a_connection_completes_only_answers_without_a_length(
    reply: bytes, complete: bool
) -> None:
    reader = read(reply)

    assert not reader.complete
    assert reader.connection_ended() is complete
    assert not reader.reusable


@pytest.mark.parametrize(
    "reply",
    [
        b"nonsense\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        OK + b"X\x00: 1\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 099 Less\r\nContent-Length: 1\r\n\r\n1" + OK + b"Content-Length: 0\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"2\r\nabc\r\n",
        CHUNKED + b"ffffffffffffffffff\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nframe",
    ],
)
def test_an_invalid_answer_is_rejected(reply: bytes) -> None:
    with pytest.raises(Malformed):
        read(reply)
    with pytest.raises(Malformed):
        read(*(reply[at : at + 1] for at in range(len(reply))))


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_no_bytes_are_too_strange(data: bytes, places: list[int]) -> None:
    with suppress(Malformed):
        read(*cut(b"HTTP/1.1 200 OK\r\n" + data, places))


def test_a_head_without_end_is_not_waited_for() -> None:
    line = b"X: %b\r\n" % (b"x" * 1000)
    with pytest.raises(Malformed, match="too large"):
        read(OK, *[line] * (MAX_HEAD_BYTES // len(line) + 1))


def test_a_body_may_be_larger_than_a_head() -> None:
    reader = read(OK + b"Content-Length: 1000000\r\n\r\n")
    for _ in range(100):
        reader.feed(b"x" * 10_000)

    assert reader.unread_bytes == len(reader.take_body()) == 1_000_000


def test_headers_of_answers_are_unchanged() -> None:
    reader = read(OK + b"X: caf\xe9\r\nx: 2\r\nContent-Length: 0\r\n\r\n")

    assert reader.headers.getall("X") == ["caf\udce9", "2"]


@pytest.mark.parametrize(
    ("url", "origin", "path", "authority"),
    [
        ("http://h/a", Origin("h", 80, tls=False, is_name=True), "/a", "h"),
        ("http://h:81/a/b?c=d", Origin("h", 81, tls=False, is_name=True), "/a/b?c=d", "h:81"),
        ("https://h.x./a", Origin("h.x.", 443, tls=True, is_name=True), "/a", "h.x"),
        ("https://10.0.0.1:8443/", Origin("10.0.0.1", 8443, tls=True, is_name=False), "/", None),
        ("http://[::1]:8000/x", Origin("::1", 8000, tls=False, is_name=False), "/x", "[::1]:8000"),
        ("http://h", Origin("h", 80, tls=False, is_name=True), "/", "h"),
    ],
)
def test_target_of_a_url(url: str, origin: Origin, path: str, authority: str | None) -> None:
    target = target_of(url)

    assert (target.origin, target.path) == (origin, path)
    assert target.authority == (authority or "10.0.0.1:8443")


@pytest.mark.parametrize("url", ["", "/path", "ftp://h/", "h:80"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an HTTP URL"):
        target_of(url)


def test_a_request_has_a_head() -> None:
    target = target_of("http://h:8000/v1?x=1")

    assert request_head(target, {"A": "b", "C": "caf\udce9"}, 5) == (
        b"POST /v1?x=1 HTTP/1.1\r\nHost: h:8000\r\nContent-Length: 5\r\nA: b\r\nC: caf\xe9\r\n\r\n"
    )
    assert request_head(target, {}, None) == b"GET /v1?x=1 HTTP/1.1\r\nHost: h:8000\r\n\r\n"
    assert b"Content-Length: 0\r\n" in request_head(target, {}, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("A", "b\r\nX: y"), ("A", "b\n"), ("A", "\r"), ("A\r\nB", "c"), ("A", "\0"), ("A\n", "\r")],
)
def test_a_header_cannot_bring_another(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        request_head(target_of("http://h/"), {name: value}, None)
