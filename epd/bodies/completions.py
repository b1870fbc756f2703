"""`/v1/completions`: a prompt without media, through prefill and decode."""

from typing import Any

from epd.bodies.endpoint import Endpoint
from epd.bodies.items import Body


class Completions(Endpoint):
    """OpenAI's completions (`vllm/entrypoints/openai/completion/protocol.py`)."""

    path = "/v1/completions"
    operation = "text_completion"
    paced = True
    tokenized = ("prompt", "add_special_tokens")

    def prefills(self, body: Body) -> bool:
        """Whether it has one prompt: `kv_transfer_params` are of one."""
        return (
            super().prefills(body) and "prompt_embeds" not in body and _is_one(body.get("prompt"))
        )


def _is_one(prompt: Any) -> bool:
    """Whether it is one text, or the tokens of one; a list may hold it."""
    match prompt:
        case [str() | list() as only]:
            return isinstance(only, str) or _is_tokens(only)
        case _:
            return isinstance(prompt, str) or _is_tokens(prompt)


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(one, int) for one in prompt)
