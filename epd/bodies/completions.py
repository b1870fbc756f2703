"""`/v1/completions`: a prompt without media, through prefill and decode."""

from epd.bodies.endpoint import Endpoint
from epd.bodies.items import Body


class Completions(Endpoint):
    """OpenAI's completions (`vllm/entrypoints/openai/completion/protocol.py`)."""

    path = "/v1/completions"
    operation = "text_completion"
    tokenized = ("prompt", "add_special_tokens")

    def prefills(self, body: Body) -> bool:
        """Whether it has one prompt: `kv_transfer_params` are of one."""
        prompt = body.get("prompt")
        tokens = isinstance(prompt, list) and all(isinstance(one, int) for one in prompt)
        return isinstance(prompt, str) or (tokens and bool(prompt))
