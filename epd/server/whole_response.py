"""Response with a complete body, faster than that of aiohttp."""

from collections.abc import Mapping

from aiohttp import HttpVersion11, web

from epd.edge.aiohttp_private import http_date

JOINED_BYTES = 16 * 1024
"""Largest body that is copied behind its head: a system call for two pieces costs more."""


class WholeResponse(web.StreamResponse):
    """Response with status 200 and a complete body. Head and body are sent by one write.

    A text request takes 5 % less CPU time with it than with `web.Response`. The signal
    `on_response_prepare` is not sent.
    """

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Make a response. The headers include the content type, and no line breaks."""
        super().__init__(headers=headers)
        self._whole = body
        self._keeps: bool | None = None
        self._sent = False

    @property
    def prepared(self) -> bool:
        return self._sent

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection stays open; None before the response is sent."""
        return self._keeps

    def force_close(self) -> None:
        self._keeps = False

    async def prepare(self, request: web.BaseRequest) -> None:
        """Send the response.

        Raises:
            ConnectionResetError: the client has disconnected.
            ValueError: a header contains a line break.
        """
        transport = request.transport
        if transport is None or transport.is_closing():  # uvloop raises on a write to a closed one
            raise ConnectionResetError("the client has disconnected")
        self._sent, version = True, request.version
        if self._keeps is None:
            self._keeps = request.keep_alive
        connection = ""
        if self._keeps != (version >= HttpVersion11):
            connection = f"Connection: {'keep-alive' if self._keeps else 'close'}\r\n"
        lines = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()])
        if not len(self.headers) == lines.count("\n") == lines.count("\r"):
            raise ValueError("a header contains a line break")
        text = (
            f"HTTP/{version.major}.{version.minor} 200 OK\r\n{lines}"
            f"Content-Length: {len(self._whole)}\r\nDate: {http_date()}\r\n{connection}\r\n"
        )
        head = text.encode("utf-8", "surrogateescape")
        if len(self._whole) <= JOINED_BYTES:
            transport.write(head + self._whole)
        else:
            # Not `writelines`: on a lost connection, asyncio's never ends in early releases of
            # Python 3.12 and 3.13.
            transport.write(head)
            transport.write(self._whole)
        await request.writer.drain()

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: `prepare` has sent the body."""
