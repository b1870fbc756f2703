"""Fields of messages, made from keys, names and entries, and read back."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson

from ec_store.arena.protocol import (
    MAX_KEYS,
    ClaimKeys,
    Find,
    NamespaceList,
    Release,
    Stats,
)
from ec_store.base import LONGEST_S, StoreStats, process_counts
from ec_store.counts import Counts
from ec_store.entry import KNOWN_HEADERS, SHORT_BYTES, EntryInfo, HeldEntry, payload_bytes
from ec_store.errors import CorruptEntry, StoreUnavailable
from ec_store.keys import EntryKey, decode_name, digest_of, encode_name, owner_bytes

T = TypeVar("T")


class Header(msgspec.Struct, array_like=True, frozen=True):
    """Description of an entry, which its writer sends and its readers get.

    It is no blob's header: that of JSON takes 0.1 ms or more to parse right after a copy, which
    empties the core's caches. `VERSION` of the protocol stands for its format.

    Attributes:
        namespace, identifier: as `encode_name` makes them.
        dtype, shape, modality, metadata: as in `Entry`.
    """

    namespace: bytes
    identifier: bytes
    dtype: Literal["BF16", "F16", "F32"]
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    modality: str
    metadata: dict[str, Any]

    @property
    def payload_bytes(self) -> int:
        return payload_bytes(self.dtype, self.shape)

    def is_of(self, key: EntryKey) -> bool:
        """Return whether it describes the entry of a key."""
        return self.identifier == encode_name(key.identifier) and self.namespace == encode_name(
            key.namespace
        )


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_headers = msgspec.msgpack.Decoder(Header)


def encode_header(key: EntryKey, entry: HeldEntry | EntryInfo) -> bytes:
    """Return the header of an entry; that of equal fields is equal.

    Its metadata are as JSON has them, as in every store. Raise TypeError if they are none.
    """
    metadata = orjson.loads(orjson.dumps(entry.metadata))
    names = encode_name(key.namespace), encode_name(key.identifier)
    return _encoder.encode((*names, entry.dtype, entry.shape, entry.modality, metadata))


def read_header(raw: bytes) -> Header:
    """Parse a header. Raise CorruptEntry if it is none."""
    try:
        return _headers.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptEntry(f"its header cannot be read: {error}") from None


def parse_header(raw: bytes) -> EntryInfo:
    """Return the fields of a header as other stores have them; errors are those of `read_header`.

    Those of the last `KNOWN_HEADERS` are kept: each turn of a chat looks up the same images.
    """
    return _known(raw) if len(raw) <= SHORT_BYTES else _parsed(raw)


def _parsed(raw: bytes) -> EntryInfo:
    header = read_header(raw)
    try:
        key = EntryKey(decode_name(header.namespace), decode_name(header.identifier))
    except ValueError as error:
        raise CorruptEntry(f"its header has no key: {error}") from None
    return EntryInfo(
        key, header.dtype, header.shape, header.modality, header.metadata, "", len(raw)
    )


_known = lru_cache(KNOWN_HEADERS)(_parsed)


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
    return ClaimKeys(key_digests(keys), owner_bytes(owner), min(seconds, LONGEST_S), find)


def release_request(keys: Sequence[EntryKey], owner: str) -> Release:
    """Return the request of a release; errors are those of `claim_request`."""
    return Release(key_digests(keys), owner_bytes(owner))


def of_each(keys: Sequence[EntryKey], values: list[T]) -> list[T]:
    """Return the values in a reply. Raise StoreUnavailable if there is not one for each key."""
    if len(values) != len(keys):
        raise StoreUnavailable(f"the arena answers {len(values)} of {len(keys)} keys")
    return values


def entry_infos(keys: Sequence[EntryKey], headers: list[bytes]) -> list[EntryInfo | None]:
    """Return the fields of the headers in a reply; None for a miss, or if one is not usable.

    Raises:
        StoreUnavailable: there is not one for each key.
    """
    infos: list[EntryInfo | None] = []
    for key, header in zip(keys, of_each(keys, headers), strict=True):
        info = None
        if header:
            try:
                info = _known(header) if len(header) <= SHORT_BYTES else _parsed(header)
            except CorruptEntry:
                pass
            else:
                found = info.key  # compared here: a call for each key costs as much again
                if found.identifier != key.identifier or found.namespace != key.namespace:
                    info = None
        infos.append(info)
    return infos


def found_or_claimed(
    keys: Sequence[EntryKey], headers: list[bytes], claims: list[bool]
) -> list[EntryInfo | bool]:
    """Return for each key its entry, or whether it was claimed; errors as `entry_infos`."""
    infos = entry_infos(keys, headers)
    return [info or claimed for info, claimed in zip(infos, of_each(keys, claims), strict=True)]


def namespaces_of(reply: NamespaceList) -> dict[str, str]:
    """Return the registered namespace of each model."""
    return {decode_name(model): decode_name(name) for model, name in reply.namespaces.items()}


def stats_of(reply: Stats, counts: Counts) -> StoreStats:
    """Return the metrics of a memory, with this process's counts of all but the evictions."""
    return StoreStats(
        entries=reply.entries,
        bytes=reply.taken_bytes,
        max_bytes=reply.size_bytes,
        leased=reply.leased,
        tiers={name: msgspec.structs.asdict(tier) for name, tier in reply.tiers.items()},
        **{**process_counts(counts), "evictions": reply.evictions},
        memory=reply.memory,
    )
