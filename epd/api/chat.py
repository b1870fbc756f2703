"""Endpoint `/v1/chat/completions`, and the encode request of a media item, which is a chat request.

The wire is vLLM's (`vllm/entrypoints/openai/chat_completion/protocol.py`).
"""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from epd.api.endpoint import Endpoint
from epd.api.items import MM_KWARGS, Body, MMItem, chat_items, raw_part
from epd.errors import BadRequest

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


class ChatCompletions(Endpoint):
    """OpenAI's chat completions, with vLLM's media parts."""

    path = "/v1/chat/completions"
    limits = ("max_tokens", "max_completion_tokens")
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
    params = {} if ec_transfer_params is None else {"ec_transfer_params": ec_transfer_params}
    ignored = "" if item.form is None else "chat_template"
    return {
        **params,
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
