"""What every answer has, and errors as answers."""

from typing import get_args

import orjson
from aiohttp import web

from epd.edge.protocol import SERVER
from epd.errors import ProxyError, UpstreamRejected
from epd.events import ItemResult, stage_seconds
from epd.request.context import RequestContext
from epd.server.slots import ANSWERED, CONTEXT


def own_headers(context: RequestContext) -> dict[str, str]:
    """Headers of every answer."""
    record = context.record
    own = {"X-Request-Id": context.client_id or context.request_id, "Server": SERVER}
    if context.span is not None:
        own["X-Trace-Id"] = context.span.trace_id
    if record.stages:
        spans = stage_seconds(record.stages)
        own["Server-Timing"] = ", ".join(
            [f"{stage};dur={seconds * 1000:.1f}" for stage, seconds in spans.items()]
        )
    if record.items:
        own["x-epd-items"] = ",".join(
            f"{result}={record.items.get(result, 0)}" for result in get_args(ItemResult)
        )
    if record.degraded:
        own["x-epd-degraded"] = ",".join(sorted(record.degraded))
    return own


def as_json(body: object, context: RequestContext, status: int = 200) -> web.Response:
    """An answer of our own, for people to read too."""
    return web.Response(
        status=status,
        body=orjson.dumps(body, option=orjson.OPT_INDENT_2),
        content_type="application/json",
        headers=own_headers(context),
    )


async def broken(
    request: web.Request, stream: web.StreamResponse, error: ProxyError
) -> web.StreamResponse:
    """A stream whose status has gone out, ended by its error, unless it has ended already."""
    if ANSWERED not in request:
        await stream.write(request[CONTEXT].endpoint.error_event(error))
        await stream.write_eof()
    return stream


def error_response(
    request: web.Request, error: ProxyError, context: RequestContext
) -> web.Response:
    """An error in its endpoint's shape."""
    response = web.Response(
        status=error.status,
        body=context.endpoint.error(error),
        content_type="application/json",
        headers={**error.headers, **own_headers(context)},
    )
    if not request.content.is_eof():  # nobody reads the rest of its body
        response.force_close()
    return response


def reason_of(error: ProxyError | None) -> str | None:
    """What lies behind an error; not what an instance said, which may quote the prompt."""
    if error is None or isinstance(error, UpstreamRejected):
        return None
    cause = error.__cause__
    return error.message if cause is None else f"{error.message}: {_kind(cause)}"


def _kind(cause: BaseException) -> str:
    """What can be logged of a library's error: its type, and the operating system's words.

    Others hold whole requests and answers: headers with keys, URLs with queries, bytes.
    """
    name = type(cause).__name__
    return f"{name}: {cause}" if isinstance(cause, OSError) else name
