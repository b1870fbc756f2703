"""`/v1/chat/completions`, and what encode instances are sent: chat requests of one item.

The wire is vLLM's chat completion API (`vllm/entrypoints/openai/chat_completion/protocol.py`).
"""

from collections.abc import Iterator

from epd.bodies.endpoint import Endpoint
from epd.bodies.items import MM_KWARGS, Body, MMItem, chat_items, raw_part
from epd.errors import BadRequest

FOR_ENCODE = ("model", "priority", *MM_KWARGS)
"""Fields of a request that its encode requests need as well."""


class ChatCompletions(Endpoint):
    """OpenAI's chat completions, with vLLM's media parts."""

    path = "/v1/chat/completions"
    limits = ("max_tokens", "max_completion_tokens")
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
        """Refuse what has no conversation."""
        if not isinstance(body.get("messages"), list):
            raise BadRequest("messages must be a list", param="messages")

    def items(self, body: Body) -> Iterator[MMItem]:
        """The media parts of all messages, in order."""
        return chat_items(body["messages"], ("messages",))


CHAT = ChatCompletions()


def encode_body(body: Body, item: MMItem, uuid: str | None) -> Body:
    """The encode request of one item: the item alone, no text."""
    return {
        **{field: body[field] for field in FOR_ENCODE if field in body},
        "messages": [{"role": "user", "content": [raw_part(item, uuid)]}],
        "stream": False,
        "max_tokens": 1,
    }
