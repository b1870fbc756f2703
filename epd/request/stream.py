"""Relay of a stream from decode to the client: whole events, without delay."""

import asyncio
import time
from contextlib import suppress

from aiohttp import hdrs, web

from epd.api.sse import EventAligner, Grammar, engine_died
from epd.api.usage import with_usage
from epd.errors import ProxyError, UpstreamFailed
from epd.request.prefill_decode import DecodeAnswer
from epd.request.recorder import Recorder

AFTER_END_S = 1.0
"""Silence after an error in a stream after which its connection is closed, in seconds."""
UNSENT_BYTES = 64 * 1024
"""With more unsent bytes than this, each write waits for the client."""


class StreamRelay:
    """Relay of one stream.

    While the client reads fast enough, events are written in the callback that receives them,
    without waking a task.
    """

    def __init__(
        self,
        answer: DecodeAnswer,
        stream: web.StreamResponse,
        transport: asyncio.WriteTransport,
        grammar: Grammar,
        record: Recorder,
    ) -> None:
        """Relay decode's answer to `stream`, which is prepared.

        The record gets the first event and the gaps between events. A conversation turn filters
        the events.
        """
        self._answer = answer
        self._reply = answer.reply
        self._stream = stream
        self._transport = transport
        self._record = record
        self._aligner = EventAligner(grammar)
        self._output = grammar.output
        self._capture = None if answer.turn is None else answer.turn.capture_fields
        self._failure: UpstreamFailed | None = None
        self._gaps = record.begin_gaps()
        self._last_s: float | None = None
        self._chunked = hdrs.TRANSFER_ENCODING in stream.headers

    async def run(self, idle_s: float) -> None:
        """Relay all events: to the last one, or to an error and the end mark that may follow it.

        Raises:
            ProxyError: the stream broke, ended early, or was silent for `idle_s` seconds.
        """
        while not self._aligner.ended:
            if await self._relay(idle_s) and not self._aligner.ended:
                raise UpstreamFailed(
                    "the decode instance closed the stream before its last event",
                    slug="decode_truncated",
                    stage="decode",
                )
        with suppress(ProxyError):  # a failure after an error event loses nothing
            while not self._aligner.done:
                if await self._relay(AFTER_END_S):
                    return

    async def drain_reply(self) -> None:
        """Read a complete answer to its end, so that its connection can be reused."""
        with suppress(ProxyError):
            await self._reply.read(idle_s=AFTER_END_S)

    async def _relay(self, idle_s: float) -> bool:
        """Relay some events. Return whether the stream has ended."""
        transport = self._transport
        if transport.get_write_buffer_size() <= UNSENT_BYTES and not transport.is_closing():
            ended = await self._reply.pour_body(self._write, idle_s)
        elif chunk := await self._reply.chunk(idle_s):
            ended = False
            if events := self._whole_events(chunk):
                await self._stream.write(events)
        else:
            ended = True
        if self._failure is not None:
            raise self._failure
        return ended

    def _write(self, chunk: bytes) -> bool:
        """Write the complete events. Return whether more can be written at once."""
        events, transport = self._whole_events(chunk), self._transport
        if transport.is_closing():  # uvloop raises on a write to a closed transport
            return False
        if events:
            transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        return (
            transport.get_write_buffer_size() <= UNSENT_BYTES
            and not self._aligner.ended
            and self._failure is None
        )

    def _whole_events(self, chunk: bytes) -> bytes:
        try:
            events = self._aligner.feed(chunk)
        except ValueError:
            self._failure = UpstreamFailed(
                "the decode instance sent an event that exceeds the size limit",
                slug="decode_bad_response",
                stage="decode",
            )
            return b""
        if self._aligner.failed and engine_died(events):
            self._answer.engine_died = True
        if events and self._time_events(events):
            self._answer.end_claims()  # decode has encoded the items
        if self._capture is not None:
            events = self._capture(events)
        if usage := self._answer.usage:
            events = with_usage(events, usage)
        self._record.add_answer(len(events))
        return events

    def _time_events(self, events: bytes) -> bool:
        """Record the time of events with tokens; return whether they are the first ones."""
        last_s = self._last_s
        if last_s is None:
            self._record.learn_model(events)
        # Comments carry no tokens. After the first tokens, only events that may be comments are
        # searched.
        if (last_s is None or events[0] in b":\r\n") and not self._output.search(events):
            return False
        self._last_s = now_s = time.monotonic()
        if last_s is not None:
            self._gaps.add(now_s - last_s)
            return False
        self._record.add_first_token(now_s)
        if self._answer.span is not None:
            self._answer.span.event("first_token")
        return True
