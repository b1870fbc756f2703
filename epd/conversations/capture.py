"""Fields in the answer of decode that are for the proxy and not for the client. Pure.

With `return_token_ids`, vLLM sends the tokens in every chunk of a stream. It sends
`kv_transfer_params` in the last chunk of a stream (since 0.33), or at the end of another answer
(`vllm/entrypoints/openai/chat_completion/protocol.py`). The fields are found by name, and nothing
else is parsed. A model's text cannot imitate such a field, because quotation marks in a JSON string
are escaped.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from epd.api.body import parse_object
from epd.errors import BadRequest

_TOKENS = re.compile(rb'((?<!\\)"(prompt_)?token_ids"\s*:\s*)\[([0-9,\s]*)\]')

_PARAMS = re.compile(rb'(?<!\\)"kv_transfer_params"\s*:\s*(?=\{)')

_DECODER = json.JSONDecoder()


@dataclass(slots=True, repr=False)
class ReplyCapture:
    """The extracted fields of one answer.

    Attributes:
        cut_tokens: whether to remove the tokens, because the client did not ask for them.
        prompt: tokens of the prompt.
        answer: tokens of the answer, which has one choice.
        params: `kv_transfer_params` of decode; None before they arrive.
    """

    cut_tokens: bool
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    params: dict[str, Any] | None = None

    def capture_fields(self, events: bytes) -> bytes:
        """Return events of a stream, or another answer, with null for the proxy's fields."""
        if b"token_ids" in events:
            events = _TOKENS.sub(self._parse_tokens, events)
        if b'"kv_transfer_params"' in events and (found := _PARAMS.search(events)):
            events = self._parse_params(events, found)
        return events

    def _parse_tokens(self, found: re.Match[bytes]) -> bytes:
        try:
            tokens = orjson.loads(b"[" + found[3] + b"]")
        except orjson.JSONDecodeError:
            return found[0]
        if found[2]:
            self.prompt = tokens
        else:
            self.answer += tokens
        return found[1] + b"null" if self.cut_tokens else found[0]

    def _parse_params(self, events: bytes, found: re.Match[bytes]) -> bytes:
        rest = events[found.end() :].decode("utf-8", "surrogateescape")
        try:
            _, end = _DECODER.raw_decode(rest)
            self.params = parse_object(rest[:end].encode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError, BadRequest):  # invalid JSON is passed on unchanged
            return events
        return events[: found.end()] + b"null" + rest[end:].encode("utf-8", "surrogateescape")
