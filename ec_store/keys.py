"""Keys of entries, and owners of claims."""

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache

MAX_PART_BYTES = 64 * 1024
MAX_OWNER_BYTES = 256

_OF_REQUEST = re.compile(r"(^|:)renderer-?\d+-mm-\d+-\w+-\d+$", re.ASCII)
"""vLLM's name of an item without `uuid` while both of its caches are off: counters of a process,
which name other media in other processes and after a restart (`BaseRenderer._process_mm_uuids`,
`vllm/renderers/base.py`). A LoRA of the encoder adds a prefix."""


@dataclass(frozen=True, slots=True, order=True)
class EntryKey:
    """Key of one encoder output.

    Attributes:
        namespace: name of the model that produced it: model, revision, encoder configuration, dtype
            and format.
        identifier: vLLM's encoder-cache key (`MultiModalFeatureSpec.identifier`), any string.

    Raises:
        ValueError: a part is longer than `MAX_PART_BYTES` bytes.
    """

    namespace: str
    identifier: str

    def __post_init__(self) -> None:
        for part in (self.namespace, self.identifier):
            # Encoded only if it may be too long: no character takes more than 4 bytes.
            if 4 * len(part) > MAX_PART_BYTES < len(part.encode("utf-8", "surrogatepass")):
                raise ValueError(f"a part of a key is longer than {MAX_PART_BYTES} bytes")

    def __eq__(self, other: object) -> bool:
        """Compare the parts, without the tuples of a dataclass: lookups compare each key."""
        if not isinstance(other, EntryKey):
            return NotImplemented
        return self.identifier == other.identifier and self.namespace == other.namespace

    def __hash__(self) -> int:
        """Return the hash of the identifier, which Python caches: claims look keys up often."""
        return hash(self.identifier)

    @property
    def digest(self) -> str:
        """Return 64 hexadecimal digits that represent the key in names of files and Redis keys.

        Text from outside never becomes part of such a name. Each part is framed by its length, so
        that different keys have different input to the hash.
        """
        return digest_of(self.namespace, self.identifier).hex()


@lru_cache(maxsize=1024)
def digest_of(*parts: str) -> bytes:
    """Return the digest of a key's namespace and identifier, 32 bytes.

    It is cached: a key is looked up, claimed and released within a second.
    """
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest.digest()


def key_or_none(namespace: str, identifier: str) -> EntryKey | None:
    """Return the key; None if a part is too long, or the identifier does not depend on content."""
    if _OF_REQUEST.search(identifier):
        return None
    try:
        return EntryKey(namespace, identifier)
    except ValueError:
        return None


def owner_bytes(owner: str) -> bytes:
    """Return an owner as stores write it.

    Raises:
        ValueError: the owner is empty, or longer than `MAX_OWNER_BYTES` bytes.
    """
    encoded = owner.encode("utf-8", "surrogatepass")
    if not 0 < len(encoded) <= MAX_OWNER_BYTES:
        raise ValueError(f"an owner must have 1 to {MAX_OWNER_BYTES} bytes")
    return encoded


def encode_name(text: str) -> bytes:
    """Return a namespace or a model as bytes: vLLM allows lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def decode_name(name: bytes) -> str:
    """Return the text of `encode_name`. Raise UnicodeDecodeError for other bytes."""
    return name.decode("utf-8", "surrogatepass")
