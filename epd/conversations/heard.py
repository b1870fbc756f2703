"""Extraction of the fields in decode's answer that are for the proxy, not for the client. Pure.

With `return_token_ids`, vLLM sends the tokens in every chunk of a stream. It sends
`kv_transfer_params` in the last chunk of a stream (since 0.33), or at the end of another answer
(`vllm/entrypoints/openai/chat_completion/protocol.py`). The fields are found by name, and nothing
else is parsed. A model's text cannot imitate such a field, because quotation marks in a JSON string
are escaped.
"""

import json
import re
from typing import Any

import orjson

from epd.bodies.parsing import parse_object
from epd.errors import BadRequest

_TOKENS = re.compile(rb'((?<!\\)"(prompt_)?token_ids"\s*:\s*)\[([0-9,\s]*)\]')
_PARAMS = re.compile(rb'(?<!\\)"kv_transfer_params"\s*:\s*(?=\{)')
_DECODER = json.JSONDecoder()


class Heard:
    """The extracted fields of one answer.

    Attributes:
        prompt: tokens of the prompt.
        answer: tokens of the answer, which has one choice.
        params: `kv_transfer_params` of decode; None before they arrive.
    """

    def __init__(self, *, cut_tokens: bool) -> None:
        """Start without fields.

        Args:
            cut_tokens: whether to remove the tokens, because the client did not ask for them.
        """
        self.prompt: list[int] = []
        self.answer: list[int] = []
        self.params: dict[str, Any] | None = None
        self._cut_tokens = cut_tokens

    def hear(self, said: bytes) -> bytes:
        """Return events of a stream, or another answer, with null for the proxy's fields."""
        if b"token_ids" in said:
            said = _TOKENS.sub(self._told_tokens, said)
        if b'"kv_transfer_params"' in said and (found := _PARAMS.search(said)):
            said = self._told_params(said, found)
        return said

    def _told_tokens(self, found: re.Match[bytes]) -> bytes:
        try:
            tokens = orjson.loads(b"[" + found[3] + b"]")
        except orjson.JSONDecodeError:
            return found[0]
        if found[2]:
            self.prompt = tokens
        else:
            self.answer += tokens
        return found[1] + b"null" if self._cut_tokens else found[0]

    def _told_params(self, said: bytes, found: re.Match[bytes]) -> bytes:
        rest = said[found.end() :].decode("utf-8", "surrogateescape")
        try:
            _, end = _DECODER.raw_decode(rest)
            self.params = parse_object(rest[:end].encode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError, BadRequest):  # invalid JSON is passed on unchanged
            return said
        return said[: found.end()] + b"null" + rest[end:].encode("utf-8", "surrogateescape")
