"""Errors as responses, and their causes in the log."""

import re

from aiohttp import web

from epd.errors import ProxyError, RequestRefused, UpstreamRejected
from epd.server.app_keys import Visit
from epd.server.key_judge import DENIED
from epd.server.responses import identity_headers, response_headers

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

MAX_PATH = 200
"""Upper bound of the characters of an unknown path that the error message quotes."""


class UnknownRoute(RequestRefused):
    """Error for a path without a route. The message quotes the path; a log must not quote it."""

    reason = "there is no such route"
    """Text for the log."""

    def __init__(self, path: str) -> None:
        message = f"there is no {path[:MAX_PATH]}: GET /openapi.json describes all routes"
        super().__init__(404, message, slug="unknown_route")


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
        headers = error.headers | identity_headers(visit.record)
        if isinstance(error, UpstreamRejected):
            error, headers = error.at_param(None), headers | SAME_FOR_ALL
    else:
        headers = error.headers | response_headers(visit.record)
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
