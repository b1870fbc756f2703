"""HTTP/1.1 as a client speaks it: the head of a request, and an answer out of bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict
from yarl import URL

CONTINUE, OK = 100, 200
"""The least status, and the least of an answer that is not an interim one."""
MAX_HEAD_BYTES = 64 * 1024
"""Largest head of an answer that is waited for."""
TEXT_ERRORS = "surrogateescape"
"""Headers go on as they came: bytes that are not UTF-8 are surrogates."""


class Malformed(ValueError):
    """What came is no answer."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where connections go.

    Attributes:
        host: as it is looked up, with the dot that ends a name which is no part of another.
        named: whether the host is a name, which has to be looked up.
    """

    host: str
    port: int
    tls: bool
    named: bool

    def __hash__(self) -> int:
        """The host's, which Python remembers: idle connections are looked up by it all the time."""
        return hash(self.host)


@dataclass(frozen=True, slots=True)
class Target:
    """What a URL means for a request.

    Attributes:
        path: with the query.
        authority: what `Host` says.
    """

    origin: Origin
    path: str
    authority: str


def http_url(url: str) -> URL:
    """Parse the URL of a request: what this refuses, no request can be sent to.

    Raises:
        ValueError: it is not a URL of HTTP with a host.
    """
    parts = URL(url)
    if parts.scheme not in {"http", "https"} or parts.raw_host is None or parts.port is None:
        raise ValueError("not an HTTP URL")
    return parts


@lru_cache(maxsize=1024)
def target_of(url: str) -> Target:
    """A URL's parts.

    Raises:
        ValueError: it is none of HTTP.
    """
    parts = http_url(url)
    host, port = parts.raw_host or "", parts.port or 0
    origin = Origin(host, port, parts.scheme == "https", _is_name(host))
    return Target(origin, parts.raw_path_qs, parts.host_port_subcomponent or host)


def _is_name(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return True
    return False


def request_head(
    target: Target, headers: Mapping[str, str], length: int | None, more: str = ""
) -> bytes:
    """The head of a POST with a body of so many bytes; of a GET without one.

    Args:
        target: what is asked for.
        headers: by name.
        length: the body's.
        more: lines of further headers, which are not checked.

    Raises:
        ValueError: a header would end its line, and begin another.
    """
    method, framing = ("GET", "") if length is None else ("POST", f"Content-Length: {length}\r\n")
    start = f"{method} {target.path} HTTP/1.1\r\nHost: {target.authority}\r\n{framing}{more}"
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if not len(headers) == lines.count("\n") == lines.count("\r") or "\0" in lines:
        raise ValueError("a header has a line's end in it")
    return f"{start}{lines}\r\n".encode("utf-8", TEXT_ERRORS)


class AnswerReader:
    """Reads one answer after the other, whose bytes may come cut anywhere.

    Attributes:
        begun: whether a byte of the answer has come.
        status: 0 until its head has come.
        headers: by name in any case.
        held: how many bytes of the body have come and were not taken.
        complete: whether all of it has come.
        reusable: whether another answer can come by the same connection.
    """

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self.expect()

    def expect(self) -> None:
        """Begin with the next answer."""
        self.begun = self.complete = self.reusable = False
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.held = 0
        self._chunks: list[bytes] = []
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take what has come next.

        Raises:
            Malformed: it does not go on like an answer.
        """
        self.begun = True
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.reusable = False
            if not self.complete:  # what comes after it is none of it
                raise Malformed("not HTTP/1.1") from error
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise Malformed("the head is too large")

    def ended(self) -> bool:
        """Take it that nothing more comes; whether that makes the answer complete."""
        framed = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        if self.status and not framed:
            self.complete = True
        return self.complete

    def take(self) -> bytes:
        """What has come of the body since it was last asked for."""
        chunks = self._chunks
        if not chunks:
            return b""
        self._chunks, self.held = [], 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Refuse a second answer: there was one request."""
        if self.complete:
            raise Malformed("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, and no trailer."""
        if not self.status:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """The head has come, or that of an interim answer."""
        status = self._parser.get_status_code()
        if status < CONTINUE:  # its body would be the next answer's
            raise Malformed("no status")
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
        """Keep a piece of the body."""
        self._chunks.append(data)
        self.held += len(data)

    def on_message_complete(self) -> None:
        """All of it has come."""
        if self.status:
            self.complete = True
            self.reusable = self._parser.should_keep_alive()
