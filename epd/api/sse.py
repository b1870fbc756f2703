"""Server-sent events, as bytes that arrive cut anywhere (WHATWG HTML, section 9.2).

What the errors of a vLLM engine say about their cause. Pure.

vLLM answers 500 to a request whose media it cannot fetch, with the words of the library that failed
(`vllm/multimodal/media/connector.py`, `_wrap_media_fetch_error`, which turns only the origin's 4xx
into 422). What fails inside the engine has one of a few messages instead.
"""

import re
from dataclasses import dataclass

from epd.json_or_none import json_or_none

MAX_EVENT_BYTES = 16 * 1024**2
"""Largest event that is waited for."""

_LF, _CR = b"\n\r"

# Two ends of line in a row. A lone CR must not match where it is half of a CRLF.
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """How an API's streams end.

    Most events have neither word, and to find a word costs less than to match a line.

    Attributes:
        done_word: is in every event that is the last.
        done: the line that tells it.
        failed_word: is in every event that is an error.
        failed: the line that tells it.
        told: the line of any event that tells of tokens or of the end. It is in none of those that
            come before the first token, and in no comment (a line that begins with a colon).
    """

    done_word: bytes
    done: re.Pattern[bytes]
    failed_word: bytes
    failed: re.Pattern[bytes]
    told: re.Pattern[bytes]


_NO_COMMENT = re.compile(rb"(?:^|[\r\n])[^:\r\n]")

OPENAI = Grammar(
    b"[DONE]",
    re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]\s"),
    b'"error"',
    re.compile(rb"(?:^|[\r\n])data: ?\{\s*\"error\""),
    _NO_COMMENT,
)
"""Streams of OpenAI's older APIs."""

_NAMED_ERROR = re.compile(rb"(?:^|[\r\n])(?:event: ?error\s|data: ?\{\s*\"error\")")

RESPONSES = Grammar(
    b'"response"',
    re.compile(rb"(?:^|[\r\n])event: ?response\.(?:completed|incomplete|failed)\s"),
    b"error",
    _NAMED_ERROR,
    re.compile(rb"(?:^|[\r\n])event: ?response\.(?!(?:created|in_progress|queued)\s)"),
)
"""Streams of OpenAI's responses API, whose events have names. The first two of vLLM's come before
it has begun with the request."""

ANTHROPIC = Grammar(
    b"message_stop",
    re.compile(rb"(?:^|[\r\n])event: ?message_stop\s"),
    b"error",
    _NAMED_ERROR,
    _NO_COMMENT,
)
"""Streams of Anthropic's messages API."""


class EventAligner:
    """Holds back the last, incomplete event of a stream, so that only whole ones go on.

    Attributes:
        done: the stream said that it is over, such as `data: [DONE]`.
        ended: it said that, or an error.
        failed: it said an error.
    """

    def __init__(self, grammar: Grammar = OPENAI) -> None:
        self.done = False
        self.ended = False
        self.failed = False
        self._grammar = grammar
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """The whole events up to here that were not returned before, byte for byte.

        Raises:
            ValueError: an event is larger than `MAX_EVENT_BYTES`.
        """
        # Most chunks are one event of this form, which no grammar takes for an error or an end. To
        # search each for the words of the grammar would cost twice as much.
        if (
            chunk[:8] == b'data: {"'
            and chunk[8:14] != b'error"'
            and chunk.find(_LF) == len(chunk) - 2
            and chunk[-1] == _LF
            and _CR not in chunk
            and not self._held
        ):
            return chunk
        # How vLLM sends them: to copy each would cost more than all the rest.
        whole = not self._held and chunk.endswith(b"\n\n")
        events = chunk if whole else self._whole_events(chunk)
        said = self._grammar
        self.done = self.done or (said.done_word in events and said.done.search(events) is not None)
        failed = said.failed_word in events and said.failed.search(events) is not None
        self.failed = self.failed or failed
        self.ended = self.ended or self.done or failed
        return events

    def _whole_events(self, chunk: bytes) -> bytes:
        # A blank line may have begun in what was searched before, at most three bytes from its end.
        start = max(0, len(self._held) - 3)
        self._held += chunk
        end = _end_of_last_event(self._held, start)
        if len(self._held) - end > MAX_EVENT_BYTES:
            raise ValueError("event too large")
        events = bytes(self._held[:end])
        del self._held[:end]
        return events


def _end_of_last_event(data: bytearray, start: int) -> int:
    if data.endswith(b"\n\n"):  # how vLLM ends each
        return len(data)
    end = 0
    for match in _BLANK_LINE.finditer(data, start):
        end = match.end()
    return end


ENGINE_DIED = b"EngineCore encountered an issue"
"""In every answer of a vLLM server whose engine died (`vllm/v1/engine/exceptions.py`,
`EngineDeadError`). The server ends a moment later."""

FAILED_INSIDE = "internal server error"
"""Message of a request that failed inside the engine (`vllm/exceptions.py`, `GenerationError`), and
of a bug in the HTTP server; in any case."""


def engine_died(reply: bytes) -> bool:
    """Return whether an error says that the engine behind a server is dead."""
    return ENGINE_DIED in reply


def may_be_fetch(reply: bytes) -> bool:
    """Return whether a 500 may mean that the engine could not fetch a request's media.

    That holds for every error in vLLM's shape that is not the engine's own: the words of HTTP
    clients are too many to list, and change.
    """
    match json_or_none(reply):
        case {"error": {"message": str() as message}}:
            return FAILED_INSIDE not in message.lower() and not engine_died(reply)
        case _:
            return False
