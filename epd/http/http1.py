"""HTTP/1.1 for a client: the head of a request, and the parser of a reply."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict
from yarl import URL

CONTINUE, OK = 100, 200
"""The lowest valid status, and the lowest status of a final reply."""
MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of a reply's head."""
TEXT_ERRORS = "surrogateescape"
"""Error handler for headers: bytes that are not UTF-8 become surrogates and are passed on."""


class Malformed(ValueError):
    """The received data is not a valid reply."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The destination of connections.

    Attributes:
        host: host for the lookup, including the final dot of an absolute name.
        is_name: whether the host is a name, which needs a lookup.
    """

    host: str
    port: int
    tls: bool
    is_name: bool

    def __hash__(self) -> int:
        # A str caches its hash, and each request looks up idle connections by origin.
        return hash(self.host)


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """The parts of a URL that a request needs.

    Attributes:
        path: path with the query.
        authority: value of the `Host` header.
    """

    origin: Origin
    path: str
    authority: str


def http_url(url: str) -> URL:
    """Parse the URL of a request. No request can be sent to a URL that this rejects.

    Raises:
        ValueError: the text is not an HTTP URL with a host.
    """
    parts = URL(url)
    if parts.scheme not in {"http", "https"} or parts.raw_host is None or parts.port is None:
        raise ValueError("not an HTTP URL")
    return parts


@lru_cache(maxsize=1024)
def target_of(url: str) -> HttpTarget:
    """Return the parts of a URL. Raise `ValueError` if it is not an HTTP URL."""
    parts = http_url(url)
    host = parts.raw_host or ""
    origin = _origin(host, parts.port or 0, tls=parts.scheme == "https")
    return HttpTarget(origin, parts.raw_path_qs, parts.host_port_subcomponent or host)


@lru_cache(maxsize=1024)
def _origin(host: str, port: int, *, tls: bool) -> Origin:
    """Return the same object for all URLs of an origin: a lookup then compares no fields."""
    return Origin(host, port, tls, not is_address(host))


def is_address(host: str) -> bool:
    """Return whether a host is an IP address and not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def request_head(
    target: HttpTarget, headers: Mapping[str, str], length: int | None, more: str = ""
) -> bytes:
    """Return the head of a POST with a body of this length, or of a GET without a body.

    The length is in bytes, or None for a GET. `more` has lines of further headers, which are not
    checked.

    Raises:
        ValueError: a header contains a line break or a null byte.
    """
    method, framing = ("GET", "") if length is None else ("POST", f"Content-Length: {length}\r\n")
    start = f"{method} {target.path} HTTP/1.1\r\nHost: {target.authority}\r\n{framing}{more}"
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if not len(headers) == lines.count("\n") == lines.count("\r") or "\0" in lines:
        raise ValueError("a header contains a line break or a null byte")
    return f"{start}{lines}\r\n".encode("utf-8", TEXT_ERRORS)


class ReplyReader:
    """Parses one reply after the other, from data that is split at arbitrary positions.

    Attributes:
        begun: whether a byte of the reply has been received.
        status: status of the reply; 0 before its head.
        headers: headers, case-insensitive.
        unread_bytes: number of received body bytes that have not been taken.
        complete: whether the whole reply has been received.
        reusable: whether the connection can carry another reply.
    """

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self.start_reply()

    def start_reply(self) -> None:
        self.begun = self.complete = self.reusable = False
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.unread_bytes = 0
        self._chunks: list[bytes] = []
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0

    @property
    def has_ended(self) -> bool:
        return self.complete and not self.unread_bytes

    def feed(self, data: bytes) -> None:
        """Parse the next received data. Raise `Malformed` if it is not a valid reply."""
        self.begun = True
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.reusable = False
            if not self.complete:  # data after a complete reply is not part of it
                raise Malformed("not HTTP/1.1") from error
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise Malformed("the head is too large")

    def connection_ended(self) -> bool:
        """Record the end of the connection. Return whether it completes the reply."""
        framed = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        if self.status and not framed:
            self.complete = True
        return self.complete

    def take_body(self) -> bytes:
        """Return the received part of the body that has not been taken."""
        chunks = self._chunks
        if not chunks:
            return b""
        self._chunks, self.unread_bytes = [], 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self.complete:
            raise Malformed("a reply without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Keep the head of the reply; ignore that of an interim reply."""
        status = self._parser.get_status_code()
        if status < CONTINUE:  # its body would be read as the next reply
            raise Malformed("not a valid status")
        if status >= OK:
            self.headers = CIMultiDict(
                [
                    (name.decode("utf-8", TEXT_ERRORS), value.decode("utf-8", TEXT_ERRORS))
                    for name, value in self._fields
                ]
            )
            self.status = status
        self._fields.clear()

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)
        self.unread_bytes += len(data)

    def on_message_complete(self) -> None:
        if self.status:  # and the reply is not an interim one
            self.complete = True
            self.reusable = self._parser.should_keep_alive()
