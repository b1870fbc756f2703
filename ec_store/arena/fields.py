"""Fields of messages, made from keys, names and headers, and read back."""

from collections.abc import Iterator, Sequence

from ec_store.arena.protocol import MAX_KEYS
from ec_store.entry import KNOWN_HEADERS, SHORT_BYTES, EntryInfo, parse_header
from ec_store.errors import CorruptEntry
from ec_store.keys import EntryKey, digest_of


def key_digest(key: EntryKey) -> bytes:
    """Return a key as messages have it."""
    return digest_of(key.namespace, key.identifier)


def digest_chunks(keys: Sequence[EntryKey]) -> Iterator[list[bytes]]:
    """Yield keys as messages have them, as many at a time as one request may have."""
    for begin in range(0, len(keys), MAX_KEYS):
        chunk = keys[begin : begin + MAX_KEYS]
        yield [digest_of(key.namespace, key.identifier) for key in chunk]


def encode_name(text: str) -> bytes:
    """Return a namespace or a model as messages have it: vLLM allows lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def decode_name(name: bytes) -> str:
    """Return the text of `encode_name`. Raise UnicodeDecodeError for other bytes."""
    return name.decode("utf-8", "surrogatepass")


_known: dict[str, tuple[bytes, EntryInfo]] = {}
"""Headers, at most `KNOWN_HEADERS`, and their fields, by identifier."""


def entry_infos(keys: Sequence[EntryKey], headers: Sequence[bytes]) -> list[EntryInfo | None]:
    """Return the fields of headers; None for a miss, and for a header that is not usable.

    A header that is the same as at the previous look-up of its key is compared, not parsed.
    """
    infos: list[EntryInfo | None] = []
    for key, header in zip(keys, headers, strict=False):
        known = _known.get(key.identifier)
        if known and known[0] == header and known[1].key.namespace == key.namespace:
            infos.append(known[1])
        else:
            infos.append(_entry_info(key, header) if header else None)
    return infos


def _entry_info(key: EntryKey, header: bytes) -> EntryInfo | None:
    try:
        info = parse_header(header)
    except CorruptEntry:
        return None
    if info.key != key:
        return None
    if len(header) <= SHORT_BYTES:
        if len(_known) >= KNOWN_HEADERS:
            _known.clear()
        _known[key.identifier] = header, info
    return info
