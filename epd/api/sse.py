"""Server-sent events of instances, in chunks split at any byte, and the causes of errors. Pure.

The events are those of WHATWG HTML, section 9.2. Each API has its own format of the end of a stream
(`Grammar`).

If vLLM cannot fetch the media of a request, it answers 500 with the message of the library that
failed (`vllm/multimodal/media/connector.py`, `_wrap_media_fetch_error`, which converts only the
origin's 4xx to 422). A failure inside the engine has one of a few fixed messages instead.
"""

import re
from dataclasses import dataclass
from itertools import islice

from epd.errors import openai_error

MAX_EVENT_BYTES = 16 * 1024**2
"""Maximum size of an event."""

ENGINE_DIED = b"EngineCore encountered an issue"
"""Text in every answer of a vLLM server after the death of its engine
(`vllm/v1/engine/exceptions.py`, `EngineDeadError`). The server ends a moment later."""

_LF, _CR = b"\n\r"

# Two ends of line in a row. A lone CR must not match where it is half of a CRLF.
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")


FAILED_INSIDE = "internal server error"
"""Message of a request that failed inside the engine (`vllm/exceptions.py`, `GenerationError`), and
of a bug in the HTTP server, in lower case; vLLM may write it in any case."""

_INSIDE = (FAILED_INSIDE.encode(), b"validation errors for chatcompletionstreamresponse")
"""Texts in the error of a stream for a request that failed inside the engine, in lower case. The
second one is that of vLLM's messages API, which cannot read the first (`anthropic/serving.py`)."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Format of the end of an API's streams.

    Most events contain neither word, and a search for a word costs less than a match of a line.

    Attributes:
        done_word: word in every event that is the last one.
        done: pattern of the line that marks the last event.
        failed_word: word in every event that is an error.
        failed: pattern of the line that marks an error.
        output: pattern of a line in every event with tokens or the end. It matches no event before
            the first token, and no comment (a line that begins with a colon).
        before: number of events before the one with the first token.
    """

    done_word: bytes
    done: re.Pattern[bytes]
    failed_word: bytes
    failed: re.Pattern[bytes]
    output: re.Pattern[bytes]
    before: int = 1

    def has_begun(self, events: bytes) -> bool:
        """Return whether the beginning of a stream has its first token, or a whole error."""
        first = next(islice(_BLANK_LINE.finditer(events), self.before, None), None)
        return first is not None or self._failure(events) is not None

    def failure_inside(self, events: bytes) -> bytes | None:
        """Return the error of a request that failed inside the engine before its first token.

        `events` is the beginning of its stream. None without such an error.
        """
        failed = self._failure(events)
        if failed is None or len(_BLANK_LINE.findall(events[: failed.start() + 1])) > self.before:
            return None
        lines = events[failed.start() :].partition(b"data:")[2].splitlines()
        error = lines[0].strip() if lines else b""
        return error if any(text in error.lower() for text in _INSIDE) else None

    def _failure(self, events: bytes) -> re.Match[bytes] | None:
        """Return the first error, if it has arrived whole."""
        failed = self.failed.search(events) if self.failed_word in events else None
        return failed if failed and _BLANK_LINE.search(events, failed.end()) else None


_NO_COMMENT = re.compile(rb"(?:^|[\r\n])[^:\r\n]")

OPENAI = Grammar(
    b"[DONE]",
    # At the start of a line. A pattern that begins with a literal is found ten times as fast.
    re.compile(rb"data:(?<![^\r\n]data:) ?\[DONE\]\s"),
    b'"error"',
    re.compile(rb"(?:^|[\r\n])data: ?\{\s*\"error\""),
    _NO_COMMENT,
)
"""Format of the streams of OpenAI's older APIs."""

_NAMED_ERROR = re.compile(rb"(?:^|[\r\n])(?:event: ?error\s|data: ?\{\s*\"error\")")

RESPONSES = Grammar(
    b'"response"',
    re.compile(rb"(?:^|[\r\n])event: ?response\.(?:completed|incomplete|failed)\s"),
    b"error",
    _NAMED_ERROR,
    re.compile(rb"(?:^|[\r\n])event: ?response\.(?!(?:created|in_progress|queued)\s)"),
    before=2,
)
"""Format of the streams of OpenAI's responses API, with named events. vLLM sends the first two
before it begins with the request."""

ANTHROPIC = Grammar(
    b"message_stop",
    re.compile(rb"(?:^|[\r\n])event: ?message_stop\s"),
    b"error",
    _NAMED_ERROR,
    _NO_COMMENT,
)
"""Format of the streams of Anthropic's messages API."""


class EventAligner:
    """Filter of a stream that holds back its last, incomplete event and passes whole ones on.

    Attributes:
        done: whether the stream has announced its end, such as by `data: [DONE]`.
        ended: whether it has announced its end or an error.
        failed: whether it has announced an error.
    """

    def __init__(self, grammar: Grammar = OPENAI, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.done = False
        self.ended = False
        self.failed = False
        self._grammar = grammar
        self._max_event_bytes = max_event_bytes
        self._partial = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Return the whole events up to here that were not returned before, byte for byte.

        Raises:
            ValueError: an event is larger than `max_event_bytes`.
        """
        # Most chunks are one event of this form, which no grammar treats as an error or an end. A
        # search of each for the words of the grammar would cost twice as much.
        if (
            chunk[:8] == b'data: {"'
            and chunk[8:14] != b'error"'
            and chunk.find(_LF) == len(chunk) - 2
            and chunk[-1] == _LF
            and _CR not in chunk
            and not self._partial
        ):
            return chunk
        # vLLM sends whole events. A copy of each would cost more than all other steps.
        whole = not self._partial and chunk.endswith(b"\n\n")
        events = chunk if whole else self._whole_events(chunk)
        grammar = self._grammar
        self.done = self.done or (
            grammar.done_word in events and grammar.done.search(events) is not None
        )
        self.failed = self.failed or (
            grammar.failed_word in events and grammar.failed.search(events) is not None
        )
        self.ended = self.done or self.failed
        return events

    def _whole_events(self, chunk: bytes) -> bytes:
        # A blank line may begin in the bytes searched before, at most three bytes from their end.
        start = max(0, len(self._partial) - 3)
        self._partial += chunk
        end = 0
        if self._partial.endswith(b"\n\n"):  # as vLLM ends each event
            end = len(self._partial)
        else:
            for match in _BLANK_LINE.finditer(self._partial, start):
                end = match.end()
        if len(self._partial) - end > self._max_event_bytes:
            raise ValueError("event too large")
        events = bytes(self._partial[:end])
        del self._partial[:end]
        return events


def engine_died(reply: bytes) -> bool:
    """Return whether an error reports that the engine of a server is dead."""
    return ENGINE_DIED in reply


def may_be_fetch(reply: bytes) -> bool:
    """Return whether a 500 may mean that the engine could not fetch a request's media.

    This applies to every error in vLLM's shape that is not the engine's own: the messages of HTTP
    clients are too many to list, and change.
    """
    error = openai_error(reply)
    if error is None or engine_died(reply):
        return False
    return FAILED_INSIDE not in error["message"].lower()
