"""Headers of all responses, and JSON of the proxy itself."""

from typing import Generic, TypeVar, get_args

import orjson
from aiohttp import web

from epd.edge.protocol import SERVER
from epd.events import ItemResult, RequestRecord, stage_seconds

ITEM_RESULTS: tuple[ItemResult, ...] = get_args(ItemResult)
"""Results of items, in the order of the header `x-epd-items`."""


def identity_headers(record: RequestRecord) -> dict[str, str]:
    """Return the headers of every response."""
    headers = {"X-Request-Id": record.request_id, "Server": SERVER}
    if record.trace_id is not None:
        headers["X-Trace-Id"] = record.trace_id
    return headers


def response_headers(record: RequestRecord) -> dict[str, str]:
    """Return the headers of a response. The response to a rejected key does not use them."""
    headers = identity_headers(record)
    if record.stages:
        spans = stage_seconds(record.stages)
        headers["Server-Timing"] = ", ".join(
            [f"{stage};dur={seconds * 1000:.1f}" for stage, seconds in spans.items()]
        )
    if record.items:
        headers["x-epd-items"] = ",".join(
            [f"{result}={record.items.get(result, 0)}" for result in ITEM_RESULTS]
        )
    if record.media:
        headers["x-epd-media"] = ",".join(f"{form}={count}" for form, count in record.media.items())
    if record.degraded:
        headers["x-epd-degraded"] = ",".join(sorted(record.degraded))
    return headers


Body = TypeVar("Body")


class JsonResponse(web.Response, Generic[Body]):
    """Response with a JSON body of this type, from which `openapi.py` makes its schema."""


def as_json(body: Body, record: RequestRecord, status: int = 200) -> JsonResponse[Body]:
    """Return a response that the proxy itself answers, as indented JSON."""
    return JsonResponse(
        status=status,
        body=orjson.dumps(body, option=orjson.OPT_INDENT_2),
        content_type="application/json",
        headers=response_headers(record),
    )
