"""Requests and fields of messages, made from keys, names and headers, and read back."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from ec_store.arena.protocol import LONGEST_S, MAX_KEYS, ClaimKeys, Find, NamespaceList, Release
from ec_store.base import LONGEST_CLAIM_S
from ec_store.entry import KNOWN_HEADERS, SHORT_BYTES, EntryInfo, parse_header
from ec_store.errors import CorruptEntry, StoreUnavailable
from ec_store.keys import EntryKey, digest_of, owner_bytes

T = TypeVar("T")


def key_digest(key: EntryKey) -> bytes:
    """Return a key as messages have it."""
    return digest_of(key.namespace, key.identifier)


def digest_chunks(keys: Sequence[EntryKey]) -> Iterator[list[bytes]]:
    """Yield keys as messages have them, as many at a time as one request may have."""
    for begin in range(0, len(keys), MAX_KEYS):
        yield [key_digest(key) for key in keys[begin : begin + MAX_KEYS]]


def find_requests(keys: Sequence[EntryKey], seconds: float) -> Iterator[Find]:
    """Yield the requests of a look-up; of a lease if `seconds` is above 0."""
    for digests in digest_chunks(keys):
        yield Find(digests, min(seconds, LONGEST_S))


def claim_requests(
    keys: Sequence[EntryKey], owner: str, seconds: float, *, find: bool
) -> Iterator[ClaimKeys]:
    """Yield the requests of a claim. Raise ValueError for an owner that is empty or too long."""
    encoded_owner = owner_bytes(owner)
    for digests in digest_chunks(keys):
        yield ClaimKeys(digests, encoded_owner, min(seconds, LONGEST_CLAIM_S), find)


def release_requests(keys: Sequence[EntryKey], owner: str) -> Iterator[Release]:
    """Yield the requests of a release; errors are those of `claim_requests`."""
    encoded_owner = owner_bytes(owner)
    for digests in digest_chunks(keys):
        yield Release(digests, encoded_owner)


def of_each(request: Find | ClaimKeys, values: list[T]) -> list[T]:
    """Return the values in a reply. Raise StoreUnavailable if there is not one for each key."""
    if len(values) != len(request.digests):
        raise StoreUnavailable(f"the arena answers {len(values)} of {len(request.digests)} keys")
    return values


def found_or_claimed(
    keys: Sequence[EntryKey], headers: Sequence[bytes], claims: Sequence[bool]
) -> list[EntryInfo | bool]:
    """Return for each key its entry, or whether it was claimed."""
    infos = entry_infos(keys, headers)
    return [info or claimed for info, claimed in zip(infos, claims, strict=True)]


def namespaces_of(reply: NamespaceList) -> dict[str, str]:
    """Return the registered namespace of each model."""
    return {decode_name(model): decode_name(name) for model, name in reply.namespaces.items()}


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
