"""Bytes that clients send: valid and invalid requests."""

import json
import socket
from typing import Any

from aiohttp import web

from tests.requests import request, text
from tests.support.fake_instance import Handler

SECRET = "sk-SECRET"


def chat(**kwargs: Any) -> bytes:
    return json.dumps(request(text(), **kwargs)).encode()


START = f"POST /v1/chat/completions HTTP/1.1\r\nHost: epd\r\nAuthorization: {SECRET}\r\n".encode()

NOT_HTTP = {
    "length and chunked": START
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": START
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": START + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi",
    "the same length twice": START + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nhi",
    "a list of lengths": START + b"Content-Length: 2, 2\r\n\r\nhi",
    "a signed length": START + b"Content-Length: +2\r\n\r\nhi",
    "a length for no length": START + b"Content-Length: 18446744073709551615\r\n\r\nhi",
    "a length of 23 digits": START + b"Content-Length: 99999999999999999999999\r\n\r\nhi",
    "a space before a colon": START + b"Content-Length : 2\r\n\r\nhi",
    "chunked twice": START + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunked and more": START + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "nearly chunked": START + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": START.replace(b"1.1", b"1.0")
    + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/3.9": START.replace(b"1.1", b"3.9") + b"\r\n",
    "bare LF": (START + b"Content-Length: 2\r\n\r\nhi").replace(b"\r\n", b"\n"),
    "one bare LF": START + b"X: y\nContent-Length: 2\r\n\r\nhi",
    "bare CR": START + b"X: y\rContent-Length: 2\r\n\r\nhi",
    "obs-fold": START + b"X: y\r\n z\r\n\r\n",
    "NUL": START + b"X: y\x00z\r\n\r\n",
    "a header without a name": START + b": y\r\n\r\n",
    "two hosts": START + b"Host: other\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "no method": b"G@T /health HTTP/1.1\r\nHost: epd\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a chunk without a size": START + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhi\r\n0\r\n\r\n",
    "a chunk that is longer": START + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi!!\r\n0\r\n\r\n",
}


def send_all(url: str, sent: bytes) -> bytes:
    """Send everything at once, as simple clients do, and then read."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as client:
        client.sendall(sent)
        return client.recv(65536)


LONG_HEAD = b"GET / HTTP/1.1\r\nHost: epd\r\nX: " + b"a" * 20_000_000 + b"\r\n\r\n"


def floods(part: bytes, sent: list[int]) -> Handler:
    """Return a handler that streams events without end."""

    async def chat(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(part)
            sent[0] += len(part)

    return chat
