"""Fields of messages, made from keys, names and headers, and read back."""

from collections.abc import Sequence
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


def key_digests(keys: Sequence[EntryKey]) -> list[bytes]:
    """Return keys as messages have them. Raise StoreUnavailable for more than `MAX_KEYS`."""
    if len(keys) > MAX_KEYS:
        raise StoreUnavailable(f"{len(keys)} keys in one call to an arena, of at most {MAX_KEYS}")
    return [digest_of(key.namespace, key.identifier) for key in keys]


def find_request(keys: Sequence[EntryKey], seconds: float = 0.0) -> Find:
    """Return the request of a look-up; of a lease if `seconds` is above 0."""
    return Find(key_digests(keys), min(seconds, LONGEST_S))


def claim_request(keys: Sequence[EntryKey], owner: str, seconds: float, *, find: bool) -> ClaimKeys:
    """Return the request of a claim. Raise ValueError for an owner that is empty or too long."""
    return ClaimKeys(key_digests(keys), owner_bytes(owner), min(seconds, LONGEST_CLAIM_S), find)


def release_request(keys: Sequence[EntryKey], owner: str) -> Release:
    """Return the request of a release; errors are those of `claim_request`."""
    return Release(key_digests(keys), owner_bytes(owner))


def of_each(keys: Sequence[EntryKey], values: list[T]) -> list[T]:
    """Return the values in a reply. Raise StoreUnavailable if there is not one for each key."""
    if len(values) != len(keys):
        raise StoreUnavailable(f"the arena answers {len(values)} of {len(keys)} keys")
    return values


_known: dict[str, tuple[bytes, EntryInfo]] = {}
"""Headers, at most `KNOWN_HEADERS`, and their fields, by identifier."""


def entry_infos(keys: Sequence[EntryKey], headers: list[bytes]) -> list[EntryInfo | None]:
    """Return the fields of the headers in a reply; None for a miss, or if one is not usable.

    A header that is the same as at the previous look-up of its key is compared, not parsed.

    Raises:
        StoreUnavailable: there is not one for each key.
    """
    infos: list[EntryInfo | None] = []
    for key, header in zip(keys, of_each(keys, headers), strict=True):
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


def found_or_claimed(
    keys: Sequence[EntryKey], headers: list[bytes], claims: list[bool]
) -> list[EntryInfo | bool]:
    """Return for each key its entry, or whether it was claimed; errors as `entry_infos`."""
    infos = entry_infos(keys, headers)
    return [info or claimed for info, claimed in zip(infos, of_each(keys, claims), strict=True)]


def namespaces_of(reply: NamespaceList) -> dict[str, str]:
    """Return the registered namespace of each model."""
    return {decode_name(model): decode_name(name) for model, name in reply.namespaces.items()}


def encode_name(text: str) -> bytes:
    """Return a namespace or a model as messages have it: vLLM allows lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def decode_name(name: bytes) -> str:
    """Return the text of `encode_name`. Raise UnicodeDecodeError for other bytes."""
    return name.decode("utf-8", "surrogatepass")
