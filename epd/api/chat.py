"""Endpoints of OpenAI's API that generate, and the encode request of media items.

The wire is vLLM's, in `vllm/entrypoints/openai`: `chat_completion/protocol.py`,
`completion/protocol.py` and `responses/protocol.py`.

- `/v1/chat/completions`. An encode instance gets a chat request with media items and a short text.
- `/v1/completions`. The prompt has no media, and goes through prefill and decode.
- `/v1/responses`, with pictures in input messages and in tool results. vLLM accepts fields of a
  part that OpenAI's API does not have, and reads them like those of a chat part
  (`vllm/renderers/chat_utils`). So a part can name the key of its encoder output, and can be sent
  without its picture.
"""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import orjson

from epd.api.endpoint import Endpoint
from epd.api.items import (
    MM_KWARGS,
    MODALITY,
    PICTURE,
    TEXTS,
    Body,
    Form,
    MMItem,
    Part,
    Path,
    chat_items,
    check_message,
    check_part,
    param_path,
    picture_part,
    raw_part,
    unknown_part,
)
from epd.api.sse import RESPONSES
from epd.errors import BadRequest, ProxyError

TEMPLATE = ("chat_template", "chat_template_kwargs")
"""Fields of a request that change its chat template. Only chat requests have the first one."""

FOR_ENCODE = ("model", *TEMPLATE, *MM_KWARGS)
"""Fields of a request that its encode requests need too.

`priority` is not one of them: according to vLLM's API, an instance without priority scheduling
rejects it, and one encode serves every request with the same item."""

OPTIONAL: Mapping[int, str] = {
    HTTPStatus.NOT_FOUND: "model",
    HTTPStatus.BAD_REQUEST: "chat_template",
}
"""Fields of an encode request that an encode instance may refuse, by the status of the refusal.

Without them it encodes the same items: with its own model, as an adapter of the language model
changes no encoder output, and with its own template."""

TEXT = {"type": "text", "text": "."}
"""Text beside the media of an encode request: some chat templates refuse a message without text."""

SYSTEM = {"role": "system", "content": TEXT["text"]}
"""System message of an encode request, for chat templates that require one."""

WORDS = TEXTS | {"reasoning_text", "summary_text"}
"""Types of parts of a response that are text; the last two belong to reasoning items."""

CONTENTS = ("content", "output")
"""Fields with the parts of an input item: of a message, and of a tool result."""

STATEFUL = ("previous_response_id", "previous_input_messages", "conversation", "background")
"""Fields that need an engine to store a response, or to continue without the client. Only that
engine would have the state, and no other could replace it."""


class ChatCompletions(Endpoint):
    """OpenAI's chat completions, with vLLM's media parts."""

    path = "/v1/chat/completions"
    limits = ("max_tokens", "max_completion_tokens")
    paced = True
    tokenized = (
        *("messages", "tools", "chat_template", "chat_template_kwargs", *MM_KWARGS),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
    )

    def check(self, body: Body) -> None:
        if not isinstance(body.get("messages"), list):
            raise BadRequest("messages must be a list", param="messages")

    def items(self, body: Body) -> Iterator[MMItem]:
        return chat_items(body["messages"], ("messages",))


CHAT = ChatCompletions()


def encode_body(
    body: Body, item: MMItem, ec_transfer_params: Mapping[str, Any] | None = None
) -> Body:
    """Return the encode request of an item, without the text of its request."""
    own = {} if ec_transfer_params is None else {"ec_transfer_params": ec_transfer_params}
    ignored = "" if item.form is None else "chat_template"
    return {
        **own,
        **{field: body[field] for field in FOR_ENCODE if field in body and field != ignored},
        "messages": [{"role": "user", "content": [raw_part(item), TEXT]}],
        "stream": False,
        "max_tokens": 1,
    }


def has_system_message(body: Body) -> bool:
    """Return whether a request of any endpoint begins with a system message."""
    if body.get("system") or body.get("instructions"):  # of messages and of responses
        return True
    match body.get("messages") or body.get("input"):
        case [{"role": "system"}, *_]:
            return True
    return False


def with_system_message(request: Body) -> Body:
    """Return an encode request with a system message, for templates that require one."""
    return {**request, "messages": [SYSTEM, *request["messages"]]}


class Completions(Endpoint):
    """OpenAI's completions: prompts of text or tokens, without media."""

    path = "/v1/completions"
    operation = "text_completion"
    paced = True
    tokenized = ("prompt", "add_special_tokens")

    def can_prefill(self, body: Body) -> bool:
        """Return whether a request has a single prompt, as `kv_transfer_params` require."""
        return (
            super().can_prefill(body)
            and "prompt_embeds" not in body
            and _is_one(body.get("prompt"))
        )


def _is_one(prompt: Any) -> bool:
    """Return whether a prompt is one text, or the tokens of one text, possibly within a list."""
    match prompt:
        case [str() | list() as only]:
            prompt = only
    if isinstance(prompt, list):
        return bool(prompt) and all(isinstance(token, int) for token in prompt)
    return isinstance(prompt, str)


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
        own = {
            "type": "error",
            "code": error.slug,
            "message": error.message,
            "param": error.param,
            "error": error.detail,
        }
        return b"event: error\ndata: " + orjson.dumps(own) + b"\n\n"


def _response_pictures(parts: list[Any], path: Path) -> Iterator[MMItem]:
    for position, part in enumerate(parts):
        where = (*path, position)
        if isinstance(part, dict) and part.get("type") == PICTURE:
            yield MMItem(where, "image_url", picture_part(part, where), RESPONSES_FORM)
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


RESPONSES_FORM = Form(_write_picture, media="image_url", named=True)
