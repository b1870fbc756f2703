"""Fields of messages, made from keys, names and headers, and read back."""

from collections.abc import Iterator, Sequence

from ec_store.arena.protocol import MAX_KEYS
from ec_store.entry import EntryInfo, parse_header
from ec_store.errors import CorruptEntry
from ec_store.keys import EntryKey


def key_digest(key: EntryKey) -> bytes:
    """Return a key as messages have it."""
    return bytes.fromhex(key.digest)


def digest_chunks(keys: Sequence[EntryKey]) -> Iterator[list[bytes]]:
    """Yield keys as messages have them, as many at a time as one request may have."""
    for begin in range(0, len(keys), MAX_KEYS):
        yield [key_digest(key) for key in keys[begin : begin + MAX_KEYS]]


def encode_name(text: str) -> bytes:
    """Return a namespace or a model as messages have it: vLLM allows lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def decode_name(name: bytes) -> str:
    """Return the text of `encode_name`. Raise UnicodeDecodeError for other bytes."""
    return name.decode("utf-8", "surrogatepass")


def entry_info(key: EntryKey, header: bytes) -> EntryInfo | None:
    """Return the fields of a header; None for a miss, and for one that is not usable."""
    if not header:
        return None
    try:
        info = parse_header(header)
    except CorruptEntry:
        return None
    return info if info.key == key else None
