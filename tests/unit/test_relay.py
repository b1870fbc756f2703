"""A stream whose client is gone before its task knows."""

import asyncio
from typing import Any, cast

import pytest
from aiohttp import web

from epd.http.connection import Sink
from epd.http.reply import Reply
from epd.request.context import RequestContext
from epd.request.relay import StreamRelay

EVENT = b"data: 1\n\n"


class Transport(asyncio.WriteTransport):
    """One that raises when it is written after its end, as uvloop's does."""

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
    """A reply during which the client leaves."""

    def __init__(self, client: Transport) -> None:
        self._client = client

    async def pour(self, sink: Sink, _: float) -> bool:
        assert sink(EVENT)
        self._client.closed = True
        assert not sink(EVENT)
        return False

    async def chunk(self, _: float) -> bytes:
        return EVENT


class Stream(web.StreamResponse):
    """An answer to a client that has left."""

    async def write(self, data: Any) -> None:
        raise ConnectionResetError


async def test_a_client_that_has_left_is_written_nothing_more() -> None:
    client = Transport()
    reply = cast("Reply", Leaving(client))
    relay = StreamRelay(reply, Stream(), client, RequestContext("id", {}))

    with pytest.raises(ConnectionResetError):
        await relay.run(1.0)
    assert client.written == EVENT
