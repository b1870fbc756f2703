"""A stream on its way from decode to the client: whole events, as they come."""

import asyncio
import time
from contextlib import suppress

from aiohttp import hdrs, web

from epd.bodies.engine_errors import engine_died
from epd.bodies.sse import EventAligner
from epd.errors import ProxyError, UpstreamFailed
from epd.events import GAPS_S
from epd.histogram import Histogram
from epd.request.context import RequestContext
from epd.upstream.reply import Reply

AFTER_END_S = 1.0
"""Silence after a stream's error, until its connection is closed rather than kept."""
UNTAKEN_BYTES = 64 * 1024
"""With more than this on its way to a client, each write waits for what the client takes."""


class StreamRelay:
    """Relays one stream.

    As long as the client takes what it is sent, events are written where they are received, for
    which no task has to wake up.
    """

    def __init__(
        self,
        reply: Reply,
        stream: web.StreamResponse,
        transport: asyncio.WriteTransport,
        context: RequestContext,
    ) -> None:
        """Relay `reply` to `stream`, which is prepared.

        Args:
            reply: decode's.
            stream: the client's.
            transport: the client's connection.
            context: says how the stream ends; told of the first event, and of the time between
                events. The turn of a conversation hears what is in them, and what of it goes on.
        """
        self._reply = reply
        self._stream = stream
        self._transport = transport
        self._context = context
        self._aligner = EventAligner(context.endpoint.grammar)
        self._told = context.endpoint.grammar.told
        self._hear = None if context.turn is None else context.turn.hear
        self._failure: UpstreamFailed | None = None
        self._gaps = context.record.gaps = Histogram(GAPS_S)
        self._last_s: float | None = None
        self._chunked = hdrs.TRANSFER_ENCODING in stream.headers

    async def run(self, idle_s: float) -> None:
        """Relay the events up to the last, or up to an error and the last that may follow.

        Raises:
            ProxyError: it broke, or stalled for `idle_s` seconds, or ended before its end.
        """
        while not self._aligner.ended:
            if await self._relay(idle_s) and not self._aligner.ended:
                raise UpstreamFailed(
                    "the decode instance ended the stream before its end",
                    slug="decode_truncated",
                    stage="decode",
                )
        with suppress(ProxyError):  # what breaks off after an error breaks nothing
            while not self._aligner.done:
                if await self._relay(AFTER_END_S):
                    return

    async def drained(self) -> None:
        """Wait for the end of an answer that is complete: its connection can be used again."""
        with suppress(ProxyError):
            await self._reply.read(idle_s=AFTER_END_S)

    async def _relay(self, idle_s: float) -> bool:
        """Relay some events; whether there are no more."""
        if self._client_takes():
            ended = await self._reply.pour(self._write, idle_s)
        elif chunk := await self._reply.chunk(idle_s):
            ended = False
            if events := self._aligned(chunk):
                await self._stream.write(events)
        else:
            ended = True
        if self._failure is not None:
            raise self._failure
        return ended

    def _write(self, chunk: bytes) -> bool:
        """Write the events that are whole now; whether more can be written at once."""
        events, transport = self._aligned(chunk), self._transport
        if transport.is_closing():  # uvloop raises where one writes that has been closed
            return False
        if events:
            transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        return (
            transport.get_write_buffer_size() <= UNTAKEN_BYTES
            and not self._aligner.ended
            and self._failure is None
        )

    def _client_takes(self) -> bool:
        return (
            self._transport.get_write_buffer_size() <= UNTAKEN_BYTES
            and not self._transport.is_closing()
        )

    def _aligned(self, chunk: bytes) -> bytes:
        try:
            events = self._aligner.feed(chunk)
        except ValueError:
            self._failure = UpstreamFailed(
                "the decode instance sent an event without end",
                slug="decode_bad_response",
                stage="decode",
            )
            return b""
        if self._aligner.failed and engine_died(events):
            self._context.watched.engine_died = True
        if events:
            self._timed(events)
        answer = events if self._hear is None else self._hear(events)
        self._context.record.answer_bytes += len(answer)
        return answer

    def _timed(self, events: bytes) -> None:
        last_s = self._last_s
        if last_s is None:
            self._context.named(events)
        # Comments tell nothing. Once tokens have come, only what may begin with one is searched.
        if (last_s is None or events[0] in b":\r\n") and not self._told.search(events):
            return
        self._last_s = now_s = time.monotonic()
        if last_s is None:
            self._context.first_event(now_s)
        else:
            self._gaps.add(now_s - last_s)
