"""Endpoint `/v1/responses`: OpenAI's responses, with pictures in input messages and tool results.

The wire is vLLM's (`vllm/entrypoints/openai/responses/protocol.py`). vLLM accepts fields of a part
that OpenAI's API does not have, and reads them like those of a chat part
(`vllm/renderers/chat_utils`). So a part can name the key of its encoder output, and can be sent
without its picture.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from epd.api.endpoint import Endpoint
from epd.api.items import (
    MODALITY,
    PICTURE,
    TEXTS,
    Body,
    Form,
    MMItem,
    Part,
    Path,
    check_message,
    check_part,
    param_path,
    picture_part,
    unknown_part,
)
from epd.api.sse import RESPONSES
from epd.errors import BadRequest, ProxyError

WORDS = TEXTS | {"reasoning_text", "summary_text"}
"""Types of parts of a response that are text; the last two belong to reasoning items."""

CONTENTS = ("content", "output")
"""Fields with the parts of an input item: of a message, and of a tool result."""

STATEFUL = ("previous_response_id", "previous_input_messages", "conversation", "background")
"""Fields that need an engine to store a response, or to continue without the client. Only that
engine would have the state, and no other could replace it."""


class Responses(Endpoint):
    """OpenAI's responses; each request has its whole conversation.

    Responses are not stored: `store` has no effect.
    """

    path = "/v1/responses"
    limits = ("max_output_tokens",)
    grammar = RESPONSES

    def parse(self, raw: bytes | bytearray) -> Body:
        """Return the request without the client's id, and with `store` off: no engine keeps it."""
        body = {key: value for key, value in super().parse(raw).items() if key != "request_id"}
        return {**body, "store": False}

    def check(self, body: Body) -> None:
        if not isinstance(body.get("input"), str | list):
            raise BadRequest("input must be a string or a list", param="input")
        for field in STATEFUL:
            if body.get(field):
                raise BadRequest(
                    f"{field} is not supported: nothing is kept between requests, "
                    "send the whole conversation as input",
                    slug="unsupported_field",
                    param=field,
                )

    def items(self, body: Body) -> Iterator[MMItem]:
        if isinstance(body["input"], str):
            return
        for index, item in enumerate(body["input"]):
            check_message(item, ("input",), index)
            for field in CONTENTS:
                if isinstance(item.get(field), list):
                    yield from _response_pictures(item[field], ("input", index, field))

    def error_event(self, error: ProxyError) -> bytes:
        """Return the API's own error event. Its `error` field makes OpenAI's client raise."""
        event = {
            "type": "error",
            "code": error.slug,
            "message": error.message,
            "param": error.param,
            "error": error.detail,
        }
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"


def _response_pictures(parts: list[Any], path: Path) -> Iterator[MMItem]:
    for position, part in enumerate(parts):
        where = (*path, position)
        if isinstance(part, dict) and part.get("type") == PICTURE:
            yield MMItem(where, "image_url", picture_part(part, where), FORM)
        elif not isinstance(part, str):
            check_part(part, where, kinds=())
            if part["type"] in MODALITY:
                raise BadRequest(
                    f"media come in parts of the type {PICTURE}", param=param_path((*where, "type"))
                )
            if part["type"] not in WORDS:
                raise unknown_part(where, (*sorted(WORDS), PICTURE))


def _write_picture(part: Part) -> Part:
    """Convert a chat part of a picture, or of its placeholder metadata, to the format of responses.

    vLLM requires `detail` in outputs of tools.
    """
    fields = {key: value for key, value in part.items() if key != "type"}
    if "image_url" in fields:
        fields["image_url"] = fields["image_url"]["url"]
    return {"type": PICTURE, "detail": "auto", **fields}


FORM = Form(_write_picture, media="image_url", named=True)
