"""Turn of a conversation, and the entry that it leaves for the next turn. Pure.

The entry has a fingerprint of the tokens in decode's blocks, by which the length of the prefix that
the next prompt shares with them is found.

The facts for the entry are fields in decode's answer for the proxy, not for the client. With
`return_token_ids`, vLLM sends the tokens in every chunk of a stream. It sends `kv_transfer_params`
in the last chunk of a stream (since 0.33), or at the end of another answer
(`vllm/entrypoints/openai/chat_completion/protocol.py`). The fields are found by name, and nothing
else is parsed. A model's text cannot imitate such a field, because quotation marks in a JSON string
are escaped.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import orjson
from pydantic import TypeAdapter

from epd.api.body import parse_object
from epd.errors import BadRequest
from epd.transfer.nixl import engine_of, kept_params

CHUNK = 32
"""Number of tokens between two digests: each token costs half a byte."""

DIGEST_BYTES = 16
"""Size of a digest. A collision would cause a wrong answer, so it must be infeasible to
construct."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A fingerprint of a sequence of tokens.

    Attributes:
        tokens: number of tokens.
        digests: hexadecimal digests of the first `CHUNK` tokens, the first 2 * `CHUNK` and so on,
            and of all.
    """

    tokens: int
    digests: str

    @classmethod
    def of_tokens(cls, tokens: Sequence[int], key: bytes = b"") -> Self:
        """Return the fingerprint of tokens. A secret key of up to 64 bytes prevents guessing them.

        Raises:
            ValueError: the values are not tokens.
        """
        return cls(len(tokens), "".join(_digests(tokens, len(tokens), key)))

    def shared_prefix_len(self, prompt: Sequence[int], key: bytes = b"") -> int:
        """Return the length of the shared prefix: a multiple of `CHUNK`, or all tokens.

        The key must be that of the fingerprint.

        Raises:
            ValueError: the values are not tokens.
        """
        whole_chunks = len(prompt) // CHUNK * CHUNK
        compared = self.tokens if len(prompt) >= self.tokens else whole_chunks
        shared = 0
        for number, digest in enumerate(_digests(prompt, compared, key)):
            at = 2 * DIGEST_BYTES * number
            if digest != self.digests[at : at + 2 * DIGEST_BYTES]:
                break
            shared = min(CHUNK * (number + 1), self.tokens)
        return shared


def _digests(tokens: Sequence[int], count: int, key: bytes) -> Iterator[str]:
    """Yield the digests of the prefixes of the first `count` tokens, in order of length."""
    try:
        packed = array("I", tokens[:count]).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError("the values are not tokens") from error
    size = array("I").itemsize * CHUNK
    running = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key)
    for start in range(0, len(packed), size):
        running.update(packed[start : start + size])
        yield running.copy().hexdigest()


MAX_ENTRY_BYTES = 1024**2
"""Maximum size of an entry: blocks and fingerprint of some 200,000 tokens."""


class Basis(NamedTuple):
    """Everything beside the tokens that the blocks of a turn depend on.

    Attributes:
        form: digest of fields of the request.
        media: keys of the media items, in order.
    """

    form: str
    media: tuple[str, ...]

    def may_continue(self, earlier: "Basis") -> bool:
        """Return whether blocks of an earlier turn may be usable."""
        return self.form == earlier.form and self.media[: len(earlier.media)] == earlier.media


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """KV blocks that a decode instance holds for a limited time.

    Attributes:
        params: `kv_transfer_params` of decode, by which prefill reads them.
        tokens: fingerprint of the tokens in the blocks.
        basis: all else that the blocks depend on.
    """

    params: dict[str, Any]
    tokens: Fingerprint
    basis: Basis

    @property
    def engine(self) -> str:
        """Id of the engine that holds them; it changes with a restart."""
        return engine_of(self.params)


@dataclass(frozen=True, slots=True)
class ConversationEntry:
    """The state of a conversation after a turn.

    Attributes:
        kept_s: time of storing, by `time.time`, because other proxies read it.
        decode: URL of the decode instance.
        prefill: URL of the prefill instance; None without prefill.
        held: blocks that decode holds, if known.
    """

    kept_s: float
    decode: str
    prefill: str | None = None
    held: HeldBlocks | None = None

    def to_json(self) -> bytes:
        return _ENTRY.dump_json(self)


_ENTRY = TypeAdapter(ConversationEntry)


def parse_entry(written: bytes) -> ConversationEntry | None:
    """Parse an entry; return None for an invalid one, which another version may have written."""
    try:
        entry = _ENTRY.validate_json(written)
        held = entry.held
        usable = held is None or kept_params(held.params, entry.decode) is not None
    except ValueError:  # a ValidationError too
        return None
    return entry if usable else None


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


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of a request in a conversation.

    Attributes:
        key: key of the conversation.
        begun: whether the previous turn has been looked up.
        before: entry of the previous turn; None without one.
    """

    key: str
    begun: bool = False
    before: ConversationEntry | None = None


class AnsweredTurn(NamedTuple):
    """A turn with its answer in progress.

    Attributes:
        key: key of the conversation.
        decode: URL of the decode instance.
        prefill: URL of the prefill instance; None without prefill.
        basis: dependencies of its blocks; None if they cannot be reused.
        capture: fields extracted from decode's answer; None if they are not extracted.
    """

    key: str
    decode: str
    prefill: str | None
    basis: Basis | None
    capture: ReplyCapture | None

    def capture_fields(self, events: bytes) -> bytes:
        """Pass events to `ReplyCapture.capture_fields`, if their fields are extracted."""
        return events if self.capture is None else self.capture.capture_fields(events)
