"""Client connections: protection against invalid and slow HTTP, in addition to aiohttp's.

aiohttp parses requests and writes responses. This module adds timeouts for a request's head and for
a client that does not read, a check of requests that aiohttp's parser accepts, a limit on
connections, and OpenAI's shape for errors that reach no handler. No part of a request is logged or
quoted but a header's name: its headers hold keys.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.typedefs import Handler

from epd.config.sections import ConfigFields
from epd.edge import aiohttp_private, request_head
from epd.edge.request_head import MAX_HEAD_BYTES, MAX_HEADERS, find_refusal, invalid, without_prefix
from epd.errors import Overloaded, ProxyError, RequestRefused
from epd.events import Observer, RequestRecord

SERVER = "epd"
"""Value of the `EdgeServer` header. aiohttp's own value would reveal its version to attackers."""
WRITE_BUFFER_BYTES = 1024**2
"""Upper bound of the bytes that wait for a client to read them. Above it, reading from decode
pauses."""
LINGER_S = 5.0
"""Seconds for which the proxy reads and discards a client's bytes after the final response. If a
connection is closed with unread bytes, it is reset, and the client may lose the response."""
MAX_REFUSALS = 64
"""Upper bound of the connections above the limit that get an error response at one time. Further
ones are closed without a response."""

DIRECT = web.AppKey("direct", Mapping[str, Handler])
"""Handlers of `POST` requests by path, called without aiohttp's router."""


class ServerConnection(aiohttp_private.RequestHandler):
    """Connection of one client.

    Attributes:
        stalled: whether it was aborted because the client did not read the response.
    """

    __slots__ = (
        "_begun",
        "_config",
        "_head",
        "_head_timer",
        "_last_payload",
        "_refused",
        "_server",
        "_write_timer",
        "stalled",
    )

    def __init__(self, server: "EdgeServer", config: ConfigFields, **kwargs: Any) -> None:
        # This class limits the whole head. aiohttp limits each line, which may be all of it.
        sizes: dict[str, Any] = {
            "max_line_size": MAX_HEAD_BYTES,
            "max_field_size": MAX_HEAD_BYTES,
            "max_headers": MAX_HEADERS,
        }
        super().__init__(server, **sizes, **kwargs)
        self._server = server
        self._config = config
        self._begun = False  # has a byte of the next head arrived?
        self._head = bytearray()  # the bytes of an incomplete head
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._last_payload: StreamReader = EMPTY_PAYLOAD
        self._refused = False
        self.stalled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        opened = cast("asyncio.Transport", transport)
        if not self._server.admit_connection(self):
            self._reject_connection(opened)
            return
        opened.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._await_head()
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._server.forget_connection(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes, and start the timer of a head that has begun."""
        if self._refused:
            return
        parsed, in_body = self.parsed, not self._last_payload.is_eof()
        if not in_body and len(self._head) + len(data) > MAX_HEAD_BYTES:
            received = self._head + data
            if request_head.head_size(received) > MAX_HEAD_BYTES:
                self._refused = True
                error = request_head.too_large(received)
                self.queue_error(error.status, error, error.message)
                self._stop_head_timer()
                return
        super().data_received(data)
        if self.parsed > parsed:
            self._head.clear()
            self._stop_head_timer()
        elif not in_body and data.strip(b"\r\n"):  # empty lines may precede a head
            self._head += data
            self._begun = True
            if self.is_between_requests:
                self._await_head()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._begun = False
        failed, payload = self.newest()
        if failed and not self._last_payload.is_eof():
            # The parser failed within a body and does not notify the body's reader.
            self._last_payload.set_exception(web.RequestPayloadError())
        self._last_payload = payload

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = _later(self._config.header_timeout_s, self._time_out_head)

    def _time_out_head(self) -> None:
        self._head_timer = None
        if not self._begun:
            self.force_close()
            return
        error = RequestRefused(
            408, "the request's head did not arrive in time", slug="header_timeout"
        )
        self.queue_error(error.status, error, error.message)

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read."""
        super().pause_writing()
        self._write_timer = _later(self._config.write_timeout_s, self._stall)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _stall(self) -> None:
        self.stalled = True
        if self.transport is not None:
            self.transport.abort()

    async def start(self) -> None:
        transport = self.transport
        try:
            await super().start()
        finally:
            # Closing waits until the client has read all bytes: this bounds the wait.
            if transport is not None and transport.get_write_buffer_size():
                _later(self._config.write_timeout_s, transport.abort)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,  # noqa: ARG002 - aiohttp's signature
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002
    ) -> web.StreamResponse:
        """Return an error response in OpenAI's shape, the last one on this connection.

        aiohttp calls this for invalid requests and for exceptions that reach no middleware.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun: it cannot become an error")
        error = _client_error(exc)
        self._refused = True
        headers = self._server.refuse_connection(error)
        response = web.Response(
            status=error.status, body=error.body(), content_type="application/json", headers=headers
        )
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the response; after the last one, give the client time to read it."""
        parsed = self.parsed
        sent, lost = await super().finish_response(request, resp, start_time)
        if self.parsed > parsed:  # requests after one that asked for an upgrade
            self._stop_head_timer()
        if self.transport is not None and not sent.keep_alive:
            _half_close(self.transport)
            if self._refused:  # aiohttp itself waits for the rest of a body
                await asyncio.sleep(LINGER_S)  # cancelled when the client closes
        elif self._begun and not self.has_queued:  # the next head's time starts now
            self._await_head()
        return sent, lost

    def _reject_connection(self, transport: asyncio.Transport) -> None:
        self._refused = True
        if not self._server.answers_refusal(self):
            transport.abort()
            return
        error = Overloaded("too many connections are open")
        transport.write(_raw(error, self._server.refuse_connection(error)))
        _half_close(transport)
        self._write_timer = _later(LINGER_S, transport.abort)


CLOSE_POLL_S = 0.01
"""Interval at which a server that ends looks for connections that are not closed yet."""


class EdgeServer(web.Server):
    """Factory of `ServerConnection`s, which limits how many are open."""

    def __init__(
        self,
        made: web.Server,
        config: ConfigFields,
        observers: Sequence[Observer],
        direct: Mapping[str, Handler],
    ) -> None:
        """Configure the server as `made`, which aiohttp has created for the application."""
        self._options: dict[str, Any] = {
            "lingering_time": LINGER_S,
            "auto_decompress": False,
            "access_log": None,
            "keepalive_timeout": config.keep_alive_s,
            # aiohttp logs headers that it cannot parse, with the keys in them.
            "logger": _silent_logger(),
        }
        super().__init__(
            self._checked,
            request_factory=_factory(made.request_factory, config.root_path),
            handler_cancellation=made.handler_cancellation,
            **self._options,
        )
        self._handler = made.request_handler
        self._direct = direct
        self._config = config
        self._observers = observers
        self._limit = config.max_connections or request_head.client_connections()
        self._open = set[ServerConnection]()
        self._rejected = set[ServerConnection]()

    def __call__(self) -> ServerConnection:
        loop = asyncio.get_running_loop()
        return ServerConnection(self, self._config, loop=loop, **self._options)

    def admit_connection(self, connection: ServerConnection) -> bool:
        """Return whether the connection gets a slot; if so, count it as open."""
        if len(self._open) >= self._limit:
            return False
        self._open.add(connection)
        return True

    def has_room(self, handshakes: int) -> bool:
        """Return whether one more handshake may begin, if only for the error response after it."""
        here = len(self._open) + len(self._rejected) + handshakes
        return here < self._limit + MAX_REFUSALS

    def answers_refusal(self, connection: ServerConnection) -> bool:
        """Return whether a rejected client gets an error response; if so, count it."""
        if len(self._rejected) >= MAX_REFUSALS:
            return False
        self._rejected.add(connection)
        return True

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - aiohttp's
        """Close all connections; without a timeout, wait until their clients have all bytes."""
        await super().shutdown(timeout)
        while timeout is None and self._open:  # noqa: ASYNC110 - only at the end of the process
            await asyncio.sleep(CLOSE_POLL_S)

    def forget_connection(self, connection: ServerConnection) -> None:
        self._open.discard(connection)
        self._rejected.discard(connection)

    def refuse_connection(self, error: ProxyError) -> dict[str, str]:
        """Report an error to the observers, and return the headers of its response."""
        request_id = uuid.uuid4().hex
        event = RequestRecord(
            request_id=request_id,
            engine_id=request_id,
            method="unknown",
            path="unknown",
            status=error.status,
            error=error.slug,
            reason=error.message,
        )
        for observer in self._observers:
            observer.request_done(event)
        return {**error.headers, "X-Request-Id": request_id, "Server": SERVER}

    async def _checked(self, request: web.BaseRequest) -> web.StreamResponse:
        if (error := find_refusal(request)) is not None:
            return request.protocol.handle_error(request, error.status, error)
        direct = self._direct.get(request.raw_path) if request.method == "POST" else None
        if direct is None:
            return await self._handler(request)
        return await direct(cast("web.Request", request))


def _factory(make: Callable[..., Any], prefix: str | None) -> Callable[..., Any]:
    """Return the factory of requests, for paths with the prefix and without it."""
    if prefix is None:
        return make
    return lambda message, *args: make(without_prefix(message, prefix), *args)


class Runner(aiohttp_private.AppRunner):
    """Runner on `ServerConnection`s. A client's disconnect cancels its request."""

    def __init__(
        self, app: web.Application, config: ConfigFields, observers: Sequence[Observer]
    ) -> None:
        """Set the application. The observers receive the errors that reach no handler."""
        super().__init__(app, handler_cancellation=True)
        self.config = config
        self._observers = observers

    def replaced(self, made: web.Server) -> EdgeServer:
        app = self.app
        # Added middlewares and signal handlers must see every request: no direct handlers then.
        changed = len(app.middlewares) > 1 or len(app.on_response_prepare) > 0
        handlers = {} if changed else app.get(DIRECT, {})
        return EdgeServer(made, self.config, self._observers, handlers)


def _client_error(failure: BaseException | None) -> ProxyError:
    """Return the error for the client. Any other failure is a bug of the proxy, and logged."""
    match failure:
        case ProxyError():
            return failure
        case HttpProcessingError(message="Too many headers received"):
            return request_head.too_many()
        case HttpProcessingError():
            return invalid("the request is not valid HTTP/1.1")
        case _:
            structlog.get_logger("epd").error("bug", exc_info=failure)
            return ProxyError("the proxy failed: see the error in its log")


def _later(delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, call)


def _half_close(transport: asyncio.Transport) -> None:
    if transport.can_write_eof() and not transport.is_closing():
        transport.write_eof()


def _raw(error: ProxyError, headers: dict[str, str]) -> bytes:
    body = error.body()
    head = {
        **headers,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    status = f"{error.status} {HTTPStatus(error.status).phrase}"
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def _silent_logger() -> logging.Logger:
    logger = logging.getLogger("epd.http")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger
