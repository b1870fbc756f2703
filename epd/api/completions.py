"""Endpoint `/v1/completions`: prompts without media, which go through prefill and decode.

The wire is vLLM's (`vllm/entrypoints/openai/completion/protocol.py`).
"""

from typing import Any

from epd.api.endpoint import Endpoint
from epd.api.items import Body


class Completions(Endpoint):
    """OpenAI's completions: prompts of text or tokens, without media."""

    path = "/v1/completions"
    operation = "text_completion"
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
