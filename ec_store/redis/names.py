"""Names of a store's keys in Redis (docs/redis.md).

    {prefix}:{<digest>}:e2     entry: 16 random bytes, the blob of docs/store-format.md
    {prefix}:{<digest>}:c      claim: the owner
    {prefix}:writing:<number>  permit of a writer of a large entry
    {prefix}:namespaces        hash, served model to namespace

The digest in braces is the hash tag: an entry and its claim are in one cluster slot. The 2 is the
number of the layout: processes of another layout neither read nor remove these entries.
"""

import re
from dataclasses import dataclass

_ENTRY = re.compile(rb".*:\{([0-9a-f]{64})\}:e2", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RedisNames:
    """Names of the keys of one store."""

    prefix: str

    @property
    def namespaces(self) -> bytes:
        return f"{self.prefix}:namespaces".encode()

    @property
    def entries(self) -> bytes:
        return f"{self.prefix}:{{*}}:e2".encode()

    def entry(self, digest: str) -> bytes:
        return f"{self.prefix}:{{{digest}}}:e2".encode()

    def claim(self, digest: str) -> bytes:
        return f"{self.prefix}:{{{digest}}}:c".encode()


def entry_digest(name: bytes) -> str | None:
    """Return the digest in the name of an entry; None for any other name."""
    match = _ENTRY.fullmatch(name)
    return match[1].decode() if match else None
