"""Endpoints `/v1/chat/completions` and `/v1/completions`, and the encode request of media items.

The wire is vLLM's, in `vllm/entrypoints/openai`: `chat_completion/protocol.py` and
`completion/protocol.py`. An encode instance gets a chat request with nothing but media items. The
prompt of a completion has no media, and goes through prefill and decode.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from epd.api.endpoint import Endpoint
from epd.api.items import MM_KWARGS, Body, MMItem, chat_items, raw_part
from epd.errors import BadRequest

FOR_ENCODE = ("model", *MM_KWARGS)
"""Fields of a request that its encode requests need too.

`priority` is not one of them: according to vLLM's API, an instance without priority scheduling
rejects it, and one encode serves every request with the same item."""


class ChatCompletions(Endpoint):
    """OpenAI's chat completions, with vLLM's media parts."""

    path = "/v1/chat/completions"
    limits = ("max_tokens", "max_completion_tokens")
    paced = True
    tokenized = (
        "messages",
        "tools",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        *MM_KWARGS,
    )

    def check(self, body: Body) -> None:
        """Reject a request without a list of messages."""
        if not isinstance(body.get("messages"), list):
            raise BadRequest("messages must be a list", param="messages")

    def items(self, body: Body) -> Iterator[MMItem]:
        """Return the media parts of all messages, in order."""
        return chat_items(body["messages"], ("messages",))


CHAT = ChatCompletions()


def feature_count(body: Body, item: MMItem) -> int:
    """Return the number of encoder outputs of an item: a video's sound has its own."""
    kwargs = body.get("mm_processor_kwargs")
    sound = isinstance(kwargs, dict) and bool(kwargs.get("use_audio_in_video"))
    return 2 if sound and item.modality == "video" else 1


def encode_body(
    body: Body,
    named: Mapping[MMItem, str | None],
    ec_transfer_params: Mapping[str, Any] | None = None,
) -> Body:
    """Return the encode request of some items, without text.

    Args:
        body: the client's request.
        named: the items, each with its name for the instance; None for no name.
        ec_transfer_params: parameters of the transfer; None for none.
    """
    own = {} if ec_transfer_params is None else {"ec_transfer_params": ec_transfer_params}
    parts = [raw_part(item, name) for item, name in named.items()]
    return {
        **own,
        **{field: body[field] for field in FOR_ENCODE if field in body},
        "messages": [{"role": "user", "content": parts}],
        "stream": False,
        "max_tokens": 1,
    }


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
            return isinstance(only, str) or _is_tokens(only)
        case _:
            return isinstance(prompt, str) or _is_tokens(prompt)


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(one, int) for one in prompt)
