"""Tokens, remembered without the tokens: enough to say how far a prompt begins with them. Pure."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

CHUNK = 32
"""Tokens from one digest to the next: half a byte is kept for each token."""

DIGEST_BYTES = 16
"""A prompt that only seems to begin with the tokens would be answered wrongly: nobody can make
one."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of a sequence of tokens.

    Attributes:
        tokens: how many there are.
        digests: of the first `CHUNK` of them, of twice as many and so on, and of all; hexadecimal.
    """

    tokens: int
    digests: str

    @classmethod
    def of(cls, tokens: Sequence[int], key: bytes = b"") -> Self:
        """That of these tokens.

        Args:
            tokens: these.
            key: without it nobody can try out what they are; 64 bytes at most, or empty.

        Raises:
            ValueError: they are none.
        """
        return cls(len(tokens), "".join(_digests(tokens, len(tokens), key)))

    def common(self, prompt: Sequence[int], key: bytes = b"") -> int:
        """How many of the first tokens a prompt shares: a multiple of `CHUNK`, or all.

        Args:
            prompt: its tokens.
            key: that of the fingerprint.

        Raises:
            ValueError: they are no tokens.
        """
        if len(prompt) < self.tokens:
            whole = len(prompt) // CHUNK * CHUNK
            ours = _digests(prompt[:whole], whole, key)
        else:
            ours = _digests(prompt, self.tokens, key)
        shared = 0
        for number, digest in enumerate(ours):
            at = 2 * DIGEST_BYTES * number
            if digest != self.digests[at : at + 2 * DIGEST_BYTES]:
                break
            shared = min(CHUNK * (number + 1), self.tokens)
        return shared


def _digests(tokens: Sequence[int], count: int, key: bytes) -> Iterator[str]:
    """Of each beginning of the first so many tokens, shorter ones first."""
    try:
        packed = array("I", tokens[:count]).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError("not what tokens are") from error
    size = array("I").itemsize * CHUNK
    running = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key)
    for start in range(0, len(packed), size):
        running.update(packed[start : start + size])
        yield running.copy().hexdigest()
