"""What decode tells the proxy in an answer, and its client does not get. Pure.

vLLM tells the tokens where `return_token_ids` asks for them, in a stream's every chunk, and
`kv_transfer_params` in a stream's last one (since 0.33) or at the end of an answer that is none
(`vllm/entrypoints/openai/chat_completion/protocol.py`). The fields are found by their names and
nothing else is parsed. What a model says cannot be taken for one: the quotation marks in a JSON
string have backslashes.
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
    """What one answer has told so far.

    Attributes:
        prompt: its tokens.
        answer: the tokens of the answer, which is one choice.
        params: decode's `kv_transfer_params`; None: it has told none yet.
    """

    def __init__(self, *, cut_tokens: bool) -> None:
        """Nothing, as yet.

        Args:
            cut_tokens: whether the client has not asked for them itself.
        """
        self.prompt: list[int] = []
        self.answer: list[int] = []
        self.params: dict[str, Any] | None = None
        self._cut_tokens = cut_tokens

    def hear(self, said: bytes) -> bytes:
        """Events of a stream, or an answer that is none: with null for what is not the client's."""
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
        except (ValueError, RecursionError, BadRequest):  # what nobody could send on
            return said
        return said[: found.end()] + b"null" + rest[end:].encode("utf-8", "surrogateescape")
