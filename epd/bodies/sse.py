"""Server-sent events, as bytes that arrive cut anywhere (WHATWG HTML, section 9.2)."""

import re

MAX_EVENT_BYTES = 16 * 1024**2
"""Largest event that is waited for."""

# Two ends of line in a row. A lone CR must not match where it is half of a CRLF.
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]\s")
_ERROR = re.compile(rb"(?:^|[\r\n])data: ?\{\s*\"error\"")


class EventAligner:
    """Holds back the last, incomplete event of a stream, so that only whole ones go on.

    Attributes:
        done: the stream said that it is over: `data: [DONE]`, OpenAI's end.
        ended: it said that, or an error.
    """

    def __init__(self) -> None:
        self.done = False
        self.ended = False
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """The whole events up to here that were not returned before, byte for byte.

        Raises:
            ValueError: an event is larger than `MAX_EVENT_BYTES`.
        """
        # How vLLM sends them: to copy each would cost more than all the rest.
        whole = not self._held and chunk.endswith(b"\n\n")
        events = chunk if whole else self._whole_events(chunk)
        # Most events hold neither word, and to find a word costs less than to match a line.
        self.done = self.done or (b"[DONE]" in events and _DONE.search(events) is not None)
        failed = b'"error"' in events and _ERROR.search(events) is not None
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
