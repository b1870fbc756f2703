"""What every answer has, and errors as answers."""

import re
from typing import get_args

import orjson
from aiohttp import web

from epd.edge.protocol import SERVER
from epd.errors import ProxyError, RequestRefused, UpstreamRejected
from epd.events import ItemResult, stage_seconds
from epd.request.context import RequestContext
from epd.server.keys import DENIED
from epd.server.visit import Visit

SAME_FOR_ALL = {"x-epd-stage": "decode", "x-epd-error": "decode_rejected"}
"""How a key's refusal is told, whichever stage asked the instance that refused it."""

ERROR_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""An `error.type` of an instance that may be logged, such as `NotFoundError`."""

FIELD = re.compile(
    r"(?=.{1,64}\Z)(?:body\.)?(?P<field>[A-Za-z_][A-Za-z0-9_]*(?:\.[0-9]+|\[[0-9]+\])*)"
    r"(?:[.\[][A-Za-z0-9_.\[\]]*)?"
)
"""A path of fields in a request, as `error.param` has it. Its first name and the indexes behind it
may be logged: in vLLM's `body.logit_bias.cat` the second name is the client's."""

ITEM_RESULTS: tuple[ItemResult, ...] = get_args(ItemResult)
"""In the order of the header `x-epd-items`."""

MAX_PATH = 200
"""Characters of a path that its client is told of."""


class UnknownRoute(RequestRefused):
    """There is no such route. The answer names the path; a log must not, as it is the client's.

    Attributes:
        reason: what a log says.
    """

    reason = "there is no such route"

    def __init__(self, path: str) -> None:
        message = f"there is no {path[:MAX_PATH]}: GET /openapi.json describes all routes"
        super().__init__(404, message, slug="unknown_route")


def _identity(context: RequestContext) -> dict[str, str]:
    """Headers by which an answer is known."""
    own = {"X-Request-Id": context.record.request_id, "Server": SERVER}
    if context.record.trace_id is not None:
        own["X-Trace-Id"] = context.record.trace_id
    return own


def own_headers(context: RequestContext) -> dict[str, str]:
    """Headers of every answer but the refusal of a key."""
    record, own = context.record, _identity(context)
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


def as_json(body: object, context: RequestContext, status: int = 200) -> web.Response:
    """An answer of our own, for people to read too."""
    return web.Response(
        status=status,
        body=orjson.dumps(body, option=orjson.OPT_INDENT_2),
        content_type="application/json",
        headers=own_headers(context),
    )


async def broken(visit: Visit, stream: web.StreamResponse, error: ProxyError) -> web.StreamResponse:
    """A stream whose status has gone out, ended by its error, unless it has ended already."""
    if visit.answered is None:
        event = visit.context.endpoint.error_event(error)
        visit.context.record.answer_bytes += len(event)
        await stream.write(event)
        await stream.write_eof()
    return stream


def error_response(
    request: web.Request, error: ProxyError, context: RequestContext
) -> web.Response:
    """An error in its endpoint's shape.

    No encode instance is asked about media that are stored. So which stage refused a key, at which
    item, and what was done until then would tell a client without a key whether somebody has sent
    them: it is told none of that.
    """
    if error.status in DENIED:
        headers = error.headers | _identity(context)
        if isinstance(error, UpstreamRejected):
            error, headers = error.at(None), headers | SAME_FOR_ALL
    else:
        headers = error.headers | own_headers(context)
    response = web.Response(
        status=error.status,
        body=context.endpoint.error(error),
        content_type="application/json",
        headers=headers,
    )
    if not request.content.is_eof():  # nobody reads the rest of its body
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
    """Return an instance's status, error type and field: its message may quote a prompt."""
    kind, param = str(error.detail["type"]), str(error.detail["param"] or "")
    named = f" {kind}" if ERROR_TYPE.fullmatch(kind) else ""
    said = f"the {error.stage} instance answered {error.status}{named}"
    # The `param` of a 5xx is not about a field.
    field = FIELD.fullmatch(param) if error.rejects_request else None
    return said if field is None else f"{said} (param {field['field']})"


def _kind(cause: BaseException) -> str:
    """What can be logged of a library's error: its type, and the operating system's words.

    Others hold whole requests and answers: headers with keys, URLs with queries, bytes.
    """
    name = type(cause).__name__
    return f"{name}: {cause}" if isinstance(cause, OSError) else name
