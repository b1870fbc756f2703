"""Endpoints `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, as vLLM has it.

vLLM converts the request to a chat request and keeps only the URL of a picture
(`vllm/entrypoints/anthropic/serving.py`), so the proxy can pass on neither a key nor placeholder
metadata. Engines name a picture by a hash of its content, which is the same for encode, prefill and
decode, and find the encoder output by that hash.
"""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import orjson

from epd.api.endpoint import Endpoint
from epd.api.items import MM_KWARGS, Body, Form, MMItem, Part, Path, param_path, unknown_part
from epd.api.sse import ANTHROPIC
from epd.errors import BadRequest, ProxyError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Values of `error.type` by status; clients evaluate them."""

RESULTS = frozenset({"text", "image", "tool_reference"})
"""Types of the blocks in a tool result that vLLM reads. It ignores all others, so they are dropped:
Anthropic's clients put documents and search results there."""

BLOCKS = RESULTS | {
    *("redacted_thinking", "thinking"),
    *("tool_addition", "tool_removal", "tool_result", "tool_use"),
}
"""Types of content blocks that vLLM accepts (`vllm/entrypoints/anthropic/protocol.py`)."""


class Messages(Endpoint):
    """Anthropic's messages, with pictures in messages and in tool results."""

    path = "/v1/messages"
    grammar = ANTHROPIC
    priority_field = False
    key_header = "X-API-Key"

    def parse(self, raw: bytes | bytearray) -> Body:
        """Return the request without the fields that vLLM reads only in chat requests."""
        body = {key: value for key, value in super().parse(raw).items() if key not in MM_KWARGS}
        for message in body["messages"]:
            if isinstance(message, dict) and isinstance(message.get("content"), list):
                _drop_ignored(message["content"])
        return body

    def check(self, body: Body) -> None:
        if not isinstance(body.get("messages"), list):
            raise BadRequest("messages must be a list", param="messages")
        system = body.get("system")
        for position, block in enumerate(system if isinstance(system, list) else ()):
            if not isinstance(block, dict) or block.get("type") != "text":
                raise unknown_part(("system", position), ("text",))

    def items(self, body: Body) -> Iterator[MMItem]:
        for index, message in enumerate(body["messages"]):
            if not isinstance(message, dict):
                raise BadRequest("a message must be an object", param=f"messages[{index}]")
            if isinstance(message.get("content"), list):
                yield from _pictures(message["content"], ("messages", index, "content"))

    def error(self, error: ProxyError) -> bytes:
        """Return an error in Anthropic's shape, also for errors of instances."""
        is_named = error.param is None or error.message.startswith(f"{error.param} ")
        is_own = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        detail = {
            "type": TYPES.get(error.status, "api_error" if is_own else "invalid_request_error"),
            "message": error.message if is_named else f"{error.param}: {error.message}",
        }
        return orjson.dumps({"type": "error", "error": detail})

    def error_event(self, error: ProxyError) -> bytes:
        """Return the event that makes Anthropic's client raise an error."""
        return b"event: error\ndata: " + self.error(error) + b"\n\n"


class CountTokens(Messages):
    """Number of tokens of a messages request: decode counts them, with the original media."""

    path = "/v1/messages/count_tokens"
    encodes = False
    generates = False
    salted = False
    operation = None


def _drop_ignored(blocks: list[Any]) -> None:
    """Drop the blocks of tool results that vLLM ignores, because a later vLLM might read them."""
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            inner = block.get("content")
            if isinstance(inner, list):
                inner[:] = [part for part in inner if not _is_ignored(part)]


def _is_ignored(block: Any) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    return isinstance(kind, str) and kind not in RESULTS


def _pictures(blocks: list[Any], path: Path, *, in_result: bool = False) -> Iterator[MMItem]:
    for position, block in enumerate(blocks):
        where = (*path, position)
        if not isinstance(block, dict):
            raise BadRequest("a content block must be an object", param=param_path(where))
        kind, inner = block.get("type"), block.get("content")
        if not isinstance(kind, str) or kind not in BLOCKS:
            raise unknown_part(where, sorted(BLOCKS))
        if kind == "image":
            # Outside tool results, vLLM ignores a picture with an empty source.
            if in_result or block.get("source") not in (None, {}):
                yield MMItem(where, "image_url", _chat_part(block.get("source"), where), FORM)
        elif kind == "tool_result" and isinstance(inner, list):
            yield from _pictures(inner, (*where, "content"), in_result=True)


def _chat_part(source: Any, path: Path) -> Part:
    """Return a picture in the format of a chat. As in vLLM, a source is base64 unless it is a URL.

    Raises:
        BadRequest: the source has no picture.
    """
    match source:
        case {"type": "url", "url": str() as url} if url:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "url"}:
            pass
        case {"data": str() as data} if data:
            if isinstance(kind := source.get("media_type"), str | None):
                url = f"data:{kind or 'image/jpeg'};base64,{data}"
                return {"type": "image_url", "image_url": {"url": url}}
    raise BadRequest(
        "the source of an image is base64 with its data, or a url",
        param=param_path((*path, "source")),
    )


FORM = Form(
    lambda part: {"type": "image", "source": {"type": "url", "url": part["image_url"]["url"]}},
    media="source",
    named=False,
)
