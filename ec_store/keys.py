"""The key of an entry, and the owner of a claim."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

MAX_PART_BYTES = 64 * 1024
MAX_OWNER_BYTES = 256


@dataclass(frozen=True, slots=True, order=True)
class EntryKey:
    """Names one encoder output.

    Attributes:
        namespace: which model made it: model, revision, encoder configuration, dtype and format.
        identifier: vLLM's encoder-cache key (`MultiModalFeatureSpec.identifier`), any string.

    Raises:
        ValueError: a part is longer than `MAX_PART_BYTES` bytes.
    """

    namespace: str
    identifier: str

    def __post_init__(self) -> None:
        """Refuse what no store could hold in a header."""
        for part in (self.namespace, self.identifier):
            # Encoded only where it matters: no character takes more than 4 bytes.
            if 4 * len(part) > MAX_PART_BYTES < len(part.encode("utf-8", "surrogatepass")):
                raise ValueError(f"a part of a key is longer than {MAX_PART_BYTES} bytes")

    def __hash__(self) -> int:
        """Return the identifier's hash, which Python keeps: claims look their keys up often."""
        return hash(self.identifier)

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that stand for the key wherever a name is needed.

        Nothing from outside becomes a file name or a Redis key as it came. Parts are framed by
        their length, so that no two keys run together.
        """
        return _digest(self.namespace, self.identifier)


@lru_cache(maxsize=1024)
def _digest(*parts: str) -> str:
    """Remembered, as a key is looked for, claimed and given back within a second."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest.hexdigest()


def key_or_none(namespace: str, identifier: str) -> EntryKey | None:
    """The key, or None where no store could hold it."""
    try:
        return EntryKey(namespace, identifier)
    except ValueError:
        return None


def owner_bytes(owner: str) -> bytes:
    """An owner as stores keep it.

    Raises:
        ValueError: it is empty, or longer than `MAX_OWNER_BYTES` bytes.
    """
    encoded = owner.encode("utf-8", "surrogatepass")
    if not 0 < len(encoded) <= MAX_OWNER_BYTES:
        raise ValueError(f"an owner has 1 to {MAX_OWNER_BYTES} bytes")
    return encoded
