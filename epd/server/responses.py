"""Responses: headers of all responses, JSON of the proxy itself, and errors."""

import re
from collections.abc import Mapping
from typing import Generic, TypeVar, get_args

import orjson
from aiohttp import HttpVersion11, web

from epd.edge.aiohttp_private import http_date
from epd.edge.protocol import SERVER
from epd.errors import ProxyError, RequestRefused, UpstreamRejected
from epd.events import ItemResult, RequestRecord, stage_seconds
from epd.server.app_keys import Visit
from epd.server.key_judge import DENIED

SAME_FOR_ALL = {"x-epd-stage": "decode", "x-epd-error": "decode_rejected"}
"""Headers of the response to a rejected key, independent of the stage that rejected it."""

ERROR_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Form of an instance's `error.type` that may be logged, such as `NotFoundError`."""

FIELD = re.compile(
    r"(?=.{1,64}\Z)(?:body\.)?(?P<field>[A-Za-z_][A-Za-z0-9_]*(?:\.[0-9]+|\[[0-9]+\])*)"
    r"(?:[.\[][A-Za-z0-9_.\[\]]*)?"
)
"""Form of `error.param`: a path of fields in a request. Only its first name and the indexes after
it are logged: in vLLM's `body.logit_bias.cat` the second name comes from the client."""

ITEM_RESULTS: tuple[ItemResult, ...] = get_args(ItemResult)
"""Results of items, in the order of the header `x-epd-items`."""

MAX_PATH = 200
"""Upper bound of the characters of an unknown path that the error message quotes."""


class UnknownRoute(RequestRefused):
    """Error for a path without a route. The message quotes the path; a log must not quote it."""

    reason = "there is no such route"
    """Text for the log."""

    def __init__(self, path: str) -> None:
        message = f"there is no {path[:MAX_PATH]}: GET /openapi.json describes all routes"
        super().__init__(404, message, slug="unknown_route")


def _identity(record: RequestRecord) -> dict[str, str]:
    own = {"X-Request-Id": record.request_id, "Server": SERVER}
    if record.trace_id is not None:
        own["X-Trace-Id"] = record.trace_id
    return own


def own_headers(record: RequestRecord) -> dict[str, str]:
    """Return the headers of a response. The response to a rejected key does not use them."""
    own = _identity(record)
    if record.stages:
        spans = stage_seconds(record.stages)
        own["Server-Timing"] = ", ".join(
            [f"{stage};dur={seconds * 1000:.1f}" for stage, seconds in spans.items()]
        )
    if record.items:
        own["x-epd-items"] = ",".join(
            [f"{result}={record.items.get(result, 0)}" for result in ITEM_RESULTS]
        )
    if record.media:
        own["x-epd-media"] = ",".join(f"{form}={count}" for form, count in record.media.items())
    if record.degraded:
        own["x-epd-degraded"] = ",".join(sorted(record.degraded))
    return own


Body = TypeVar("Body")


class JsonResponse(web.Response, Generic[Body]):
    """Response with a JSON body of this type, from which `openapi.py` makes its schema."""


def as_json(body: Body, record: RequestRecord, status: int = 200) -> JsonResponse[Body]:
    """Return a response that the proxy itself answers, as indented JSON."""
    return JsonResponse(
        status=status,
        body=orjson.dumps(body, option=orjson.OPT_INDENT_2),
        content_type="application/json",
        headers=own_headers(record),
    )


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
            transport.writelines((head, self._whole))
        await request.writer.drain()

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: `prepare` has sent the body."""


async def end_broken_response(
    request: web.Request, visit: Visit, stream: web.StreamResponse, error: ProxyError
) -> web.StreamResponse:
    """End a response that has begun, unless it has ended already.

    A stream ends with an error event. Any other response is cut off, so that it is not complete.
    """
    if visit.answered is not None:
        return stream
    if not visit.record.stream:
        if request.transport is not None:
            request.transport.abort()
    else:
        event = visit.endpoint.error_event(error)
        visit.record.add_answer(len(event))
        await stream.write(event)
        await stream.write_eof()
    return stream


def error_response(request: web.Request, error: ProxyError, visit: Visit) -> web.Response:
    """Return an error in the shape of its endpoint.

    The response to a rejected key hides the stage, the item and the work done so far. The proxy
    sends no encode request for stored media, so these would tell a client without a valid key
    whether another client has sent the same media.
    """
    if error.status in DENIED:
        headers = error.headers | _identity(visit.record)
        if isinstance(error, UpstreamRejected):
            error, headers = error.at_param(None), headers | SAME_FOR_ALL
    else:
        headers = error.headers | own_headers(visit.record)
    response = web.Response(
        status=error.status,
        body=visit.endpoint.error(error),
        content_type="application/json",
        headers=headers,
    )
    if not request.content.is_eof():  # the rest of the body is not read
        response.force_close()
    return response


def reason_of(error: ProxyError) -> str:
    """Return the cause of an error, for logs."""
    if isinstance(error, UnknownRoute):
        return error.reason
    if isinstance(error, UpstreamRejected):
        return _refusal(error)
    cause = error.__cause__
    return error.message if cause is None else f"{error.message}: {_kind(cause)}"


def _refusal(error: UpstreamRejected) -> str:
    """Return an instance's status, error type and field, without its message.

    The message may quote a prompt.
    """
    kind, param = str(error.detail["type"]), str(error.detail["param"] or "")
    named = f" {kind}" if ERROR_TYPE.fullmatch(kind) else ""
    message = f"the {error.stage} instance answered {error.status}{named}"
    # The `param` of a 5xx is not about a field.
    field = FIELD.fullmatch(param) if error.rejects_request else None
    return message if field is None else f"{message} (param {field['field']})"


def _kind(cause: BaseException) -> str:
    """Return a library error's type, with the message if the error is an `OSError`.

    Messages of other errors may hold whole requests and responses: keys, URLs with queries, bytes.
    """
    name = type(cause).__name__
    return f"{name}: {cause}" if isinstance(cause, OSError) else name
