"""Minimal HTTP/1.1 for the load client and the fake engines.

A library would cost more than the proxy that is measured: both ends of the load share one core.
"""

HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length:"
CHUNKED = b"transfer-encoding: chunked"
LAST_CHUNK = b"0\r\n\r\n"


class Message:
    """Request or response that is being received.

    Attributes:
        head: first line and headers, in lower case; empty until they are complete.
        body: bytes of the body so far, with the framing of chunks.
        complete: whether the whole message has arrived.
    """

    def __init__(self) -> None:
        self.head = b""
        self.body = bytearray()
        self.complete = False
        self._length: int | None = None

    def feed(self, data: bytes) -> None:
        """Add received bytes. The peer sends its next message only after the answer."""
        self.body += data
        if not self.head:
            end = self.body.find(HEAD_END)
            if end < 0:
                return
            self.head = bytes(self.body[:end]).lower()
            del self.body[: end + len(HEAD_END)]
            self._length = _length(self.head)
        if self._length is None:
            self.complete = self.body.endswith(LAST_CHUNK)
        else:
            self.complete = len(self.body) >= self._length

    def content(self) -> bytes:
        """Return the body of a complete message, without the framing of chunks."""
        if self._length is not None:
            return bytes(self.body)
        parts, place = list[bytes](), 0
        while True:
            line = self.body.index(b"\r\n", place)
            size = int(self.body[place:line], 16)
            if not size:
                return b"".join(parts)
            place = line + 2 + size + 2
            parts.append(bytes(self.body[line + 2 : place - 2]))

    @property
    def status(self) -> int:
        """Return the HTTP status of a response."""
        return int(self.head[9:12])


def _length(head: bytes) -> int | None:
    """Return the length of the body in bytes; None if it is chunked."""
    start = head.find(LENGTH)
    if start >= 0:
        return int(head[start + len(LENGTH) :].split(b"\r\n", 1)[0])
    return None if CHUNKED in head else 0


def head(first_line: str, body: bytes | None, content_type: str = "application/json") -> bytes:
    """Return the head of a message; without a body, it announces chunks."""
    framing = "Transfer-Encoding: chunked" if body is None else f"Content-Length: {len(body)}"
    lines = (first_line, "Host: measured", f"Content-Type: {content_type}", framing, "", "")
    return "\r\n".join(lines).encode()


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
