"""Server-sent events, as bytes that arrive cut anywhere (WHATWG HTML, section 9.2)."""

import re
from dataclasses import dataclass

MAX_EVENT_BYTES = 16 * 1024**2
"""Largest event that is waited for."""

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
        begun: the line of any event but those that come before the first token; None: none do.
    """

    done_word: bytes
    done: re.Pattern[bytes]
    failed_word: bytes
    failed: re.Pattern[bytes]
    begun: re.Pattern[bytes] | None = None


OPENAI = Grammar(
    b"[DONE]",
    re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]\s"),
    b'"error"',
    re.compile(rb"(?:^|[\r\n])data: ?\{\s*\"error\""),
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
    b"message_stop", re.compile(rb"(?:^|[\r\n])event: ?message_stop\s"), b"error", _NAMED_ERROR
)
"""Streams of Anthropic's messages API."""


class EventAligner:
    """Holds back the last, incomplete event of a stream, so that only whole ones go on.

    Attributes:
        done: the stream said that it is over, such as `data: [DONE]`.
        ended: it said that, or an error.
    """

    def __init__(self, grammar: Grammar = OPENAI) -> None:
        self.done = False
        self.ended = False
        self._grammar = grammar
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """The whole events up to here that were not returned before, byte for byte.

        Raises:
            ValueError: an event is larger than `MAX_EVENT_BYTES`.
        """
        # How vLLM sends them: to copy each would cost more than all the rest.
        whole = not self._held and chunk.endswith(b"\n\n")
        events = chunk if whole else self._whole_events(chunk)
        said = self._grammar
        self.done = self.done or (said.done_word in events and said.done.search(events) is not None)
        failed = said.failed_word in events and said.failed.search(events) is not None
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
