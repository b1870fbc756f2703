"""Turn of a conversation: the entry of the previous turn, and the facts for the entry of this one.

The facts are fields in decode's answer for the proxy, not for the client. With `return_token_ids`,
vLLM sends the tokens in every chunk of a stream. It sends `kv_transfer_params` in the last chunk of
a stream (since 0.33), or at the end of another answer
(`vllm/entrypoints/openai/chat_completion/protocol.py`). The fields are found by name, and nothing
else is parsed. A model's text cannot imitate such a field, because quotation marks in a JSON string
are escaped. Pure.
"""

import json
import re
from typing import Any, NamedTuple

import orjson

from epd.api.body import parse_object
from epd.api.items import Body
from epd.conversations.entry import ConversationEntry, HeldBlocks
from epd.errors import BadRequest

_TOKENS = re.compile(rb'((?<!\\)"(prompt_)?token_ids"\s*:\s*)\[([0-9,\s]*)\]')
_PARAMS = re.compile(rb'(?<!\\)"kv_transfer_params"\s*:\s*(?=\{)')
_DECODER = json.JSONDecoder()


class ReplyCapture:
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

    def capture_fields(self, said: bytes) -> bytes:
        """Return events of a stream, or another answer, with null for the proxy's fields."""
        if b"token_ids" in said:
            said = _TOKENS.sub(self._parse_tokens, said)
        if b'"kv_transfer_params"' in said and (found := _PARAMS.search(said)):
            said = self._parse_params(said, found)
        return said

    def _parse_tokens(self, found: re.Match[bytes]) -> bytes:
        try:
            tokens = orjson.loads(b"[" + found[3] + b"]")
        except orjson.JSONDecodeError:
            return found[0]
        if found[2]:
            self.prompt = tokens
        else:
            self.answer += tokens
        return found[1] + b"null" if self._cut_tokens else found[0]

    def _parse_params(self, said: bytes, found: re.Match[bytes]) -> bytes:
        rest = said[found.end() :].decode("utf-8", "surrogateescape")
        try:
            _, end = _DECODER.raw_decode(rest)
            self.params = parse_object(rest[:end].encode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError, BadRequest):  # invalid JSON is passed on unchanged
            return said
        return said[: found.end()] + b"null" + rest[end:].encode("utf-8", "surrogateescape")


class Basis(NamedTuple):
    """Everything beside the tokens that the blocks of a turn depend on.

    Attributes:
        form: digest of fields of the request.
        media: keys of the media items, in order.
    """

    form: str
    media: tuple[str, ...]

    def may_continue(self, held: HeldBlocks) -> bool:
        """Return whether blocks of an earlier turn may be usable."""
        return self.form == held.form and self.media[: len(held.media)] == held.media


class Turn:
    """The turn of a request in a conversation.

    Attributes:
        key: key of the conversation.
        begun: whether the previous turn has been looked up.
        before: entry of the previous turn; None without one.
        prefill: URL of the prefill instance of this turn.
        decode: URL of the decode instance of this turn.
        basis: dependencies of its blocks; None if they cannot be reused.
        heard: fields extracted from decode's answer; None if they are not extracted.
    """

    __slots__ = ("_held", "basis", "before", "begun", "decode", "heard", "key", "prefill")

    def __init__(self, key: str) -> None:
        self.key = key
        self.begun = False
        self.before: ConversationEntry | None = None
        self._held: HeldBlocks | None = None
        self.prefill: str | None = None
        self.decode: str | None = None
        self.basis: Basis | None = None
        self.heard: ReplyCapture | None = None

    @property
    def prefers_prefill(self) -> str | None:
        """URL of the previous turn's prefill instance, which may have the blocks itself."""
        return None if self.before is None else self.before.prefill

    @property
    def prefers_decode(self) -> str | None:
        """URL of the previous turn's decode instance."""
        return None if self.before is None else self.before.decode

    def follow_entry(self, before: ConversationEntry) -> None:
        """Continue with the entry of the previous turn."""
        self.before, self._held = before, before.held

    def take_blocks(self) -> HeldBlocks | None:
        """Return the blocks of the previous turn; only the first call returns them."""
        held, self._held = self._held, None
        return held

    def with_tokens(self, body: Body) -> Body:
        """Return the decode request, which asks for the tokens if they are needed."""
        wanted = bool(body.get("return_token_ids"))
        self.heard = ReplyCapture(cut_tokens=not wanted)
        return body if self.basis is None or wanted else {**body, "return_token_ids": True}

    def capture_fields(self, said: bytes) -> bytes:
        """Pass events to `ReplyCapture.capture_fields`, if their fields are extracted."""
        return said if self.heard is None else self.heard.capture_fields(said)
