"""Entry that a turn of a conversation leaves for the next one. Pure.

It has a fingerprint of the tokens in decode's blocks, by which the length of the prefix that the
next prompt shares with them is found.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter

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
class StoredBlocks:
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
        stored_s: time of storing, by `time.time`, because other proxies read it.
        decode: URL of the decode instance.
        prefill: URL of the prefill instance; None without prefill.
        blocks: blocks that decode holds, if known.
    """

    stored_s: float
    decode: str
    prefill: str | None = None
    blocks: StoredBlocks | None = None

    def to_json(self) -> bytes:
        return _ENTRY.dump_json(self)


_ENTRY = TypeAdapter(ConversationEntry)


def parse_entry(written: bytes) -> ConversationEntry | None:
    """Parse an entry; return None for an invalid one, which another version may have written."""
    try:
        entry = _ENTRY.validate_json(written)
        blocks = entry.blocks
        usable = blocks is None or kept_params(blocks.params, entry.decode) is not None
    except ValueError:  # a ValidationError too
        return None
    return entry if usable else None
