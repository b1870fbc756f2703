"""Stream to the client: disconnects, and timing."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from epd.api.endpoints import ENDPOINTS
from epd.api.sse import OPENAI
from epd.http.connection import Sink
from epd.request.prefill_decode import DecodeAnswer
from epd.request.recorder import Recorder
from epd.request.stream import StreamRelay
from epd.routing.fatal import Watched
from epd.upstream import Reply

EVENT = b"data: 1\n\n"


class Transport(asyncio.WriteTransport):
    """Transport that raises on a write after its end, as uvloop's does."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed


class Leaving:
    """Reply during which the client disconnects."""

    def __init__(self, client: Transport) -> None:
        self._client = client

    async def pour_body(self, sink: Sink, _: float) -> bool:
        assert sink(EVENT)
        self._client.closed = True
        assert not sink(EVENT)
        return False

    async def chunk(self, _: float) -> bytes:
        return EVENT


class Stream(web.StreamResponse):
    """Response to a client that has disconnected."""

    async def write(self, data: Any) -> None:
        raise ConnectionResetError


class Chunked:
    """Reply with these chunks; it calls `seen` after each."""

    def __init__(self, chunks: list[bytes], seen: Callable[[], None] = lambda: None) -> None:
        self._chunks = iter(chunks)
        self._seen = seen

    async def pour_body(self, sink: Sink, _: float) -> bool:
        for chunk in self._chunks:
            more = sink(chunk)
            self._seen()
            if not more:
                return False
        return True


COMMENTS = [b": keep-alive\n\n", b":\r\n\r\n", b": data: 1\n: event: response.x\n\n"]
STREAMS = {
    "/v1/chat/completions": (b'data: {"n": 1}\n\n', b"data: [DONE]\n\n"),
    "/v1/responses": (
        b'event: response.output_text.delta\r\ndata: {"n": 1}\r\n\r\n',
        b'event: response.completed\ndata: {"response": {}}\n\n',
    ),
    "/v1/messages": (
        b'event: content_block_delta\ndata: {"n": 1}\n\n',
        b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
    ),
}
"""Event with tokens and last event, for each grammar."""


def answer_of(reply: Reply) -> DecodeAnswer:
    nothing: Any = None
    return DecodeAnswer(reply, None, None, {}, nothing, nothing, Watched(), (), [])


async def relayed(path: str, chunks: list[bytes]) -> tuple[bytes, list[tuple[bytes, bool, int]]]:
    """Return all written bytes, and after each chunk: bytes, first token seen, number of gaps."""
    record, client = Recorder("", "POST", ""), Transport()
    moments: list[tuple[bytes, bool, int]] = []

    def look() -> None:
        gaps = record.gaps
        assert gaps is not None
        begun = record.first_token_s is not None
        moments.append((client.written, begun, sum(gaps.counts)))

    reply = cast("Reply", Chunked(chunks, look))
    stream, grammar = web.StreamResponse(), ENDPOINTS[path].grammar
    await StreamRelay(answer_of(reply), stream, client, grammar, record).run(1.0)
    return client.written, moments


@pytest.mark.parametrize("path", STREAMS)
@given(
    before=st.lists(st.sampled_from(COMMENTS), max_size=3),
    between=st.lists(st.lists(st.sampled_from(COMMENTS), max_size=3), min_size=1, max_size=4),
)
async def test_comments_are_neither_the_first_token_nor_gaps(
    path: str, before: list[bytes], between: list[list[bytes]]
) -> None:
    event, last = STREAMS[path]
    chunks = [*before, *(chunk for comments in between for chunk in (event, *comments)), last]
    written, moments = await relayed(path, chunks)

    assert written == b"".join(chunks)
    assert not any(begun for _, begun, _ in moments[: len(before)])
    assert moments[len(before)][1:] == (True, 0)
    assert moments[-1][2] == len(between)  # one gap before each further event


@pytest.mark.parametrize("path", STREAMS)
@given(
    before=st.lists(st.sampled_from(COMMENTS), max_size=3),
    after=st.lists(st.sampled_from(COMMENTS), max_size=3),
    points=st.lists(st.integers(min_value=0)),
)
async def test_a_stream_is_relayed_unchanged_wherever_it_is_cut(
    path: str, before: list[bytes], after: list[bytes], points: list[int]
) -> None:
    event, last = STREAMS[path]
    stream = b"".join([*before, event, *after, last])
    edges = [0, *sorted(point % (len(stream) + 1) for point in points), len(stream)]
    chunks = [stream[a:b] for a, b in pairwise(edges) if a < b]
    written, moments = await relayed(path, chunks)

    assert written == stream
    told = len(b"".join(before)) + len(event)
    for so_far, begun, gaps in moments:
        # A CRLF event may be forwarded without its last LF: it is complete already.
        assert begun is (len(so_far) >= told - 1)
        assert gaps <= (len(so_far) == len(stream))


async def test_a_client_that_has_left_is_written_nothing_more() -> None:
    client = Transport()
    reply = cast("Reply", Leaving(client))
    relay = StreamRelay(answer_of(reply), Stream(), client, OPENAI, Recorder("", "POST", ""))

    with pytest.raises(ConnectionResetError):
        await relay.run(1.0)
    assert client.written == EVENT
