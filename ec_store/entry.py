"""An entry and its format: one blob that any safetensors reader opens.

    8 bytes     length of the header, little-endian
    header      JSON, padded with spaces to a multiple of 64 bytes, the length field included
    payload     the tensor's bytes, little-endian, row-major

The header names the tensor `ec_cache` and holds, as safetensors' `__metadata__`, all that a reader
needs to trust the entry (docs/store-format.md). Safetensors:
https://github.com/huggingface/safetensors#format
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

import orjson
import xxhash

from ec_store.errors import CorruptEntry
from ec_store.keys import EntryKey

TENSOR = "ec_cache"
FORMAT = "ec_store/1"
ALIGNMENT = 64
"""Header and length field end on a multiple of this, so that a mapped payload is aligned."""

MAX_HEADER_BYTES = 1024**2
KNOWN_HEADERS = 1024
SHORT_BYTES = 1024
"""So many headers that are no longer than this are not parsed again where they are the same:
a chat's pictures are looked up in each of its turns. They take some 2 MB."""

_PLAIN = re.compile(r"[\w.~ /:;,=@+()\[\]-]*", re.ASCII)
ITEM_BYTES: Mapping[str, int] = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes of one value of each dtype that is kept, by safetensors' name for it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One encoder output.

    Attributes:
        data: the tensor's bytes, little-endian, row-major; read-only when it comes from a store,
            where it may be a view of a mapped file.
        dtype: `BF16`, `F16` or `F32`.
        shape: usually (tokens, width).
        modality: `image`, `audio` or `video`.
        metadata: placeholder metadata as vLLM reports it, such as
            `{"image_grid_thw": [1, 36, 54]}`; JSON values, read-only when it comes from a store.

    Raises:
        ValueError: dtype, shape and length do not fit each other.
    """

    data: memoryview
    dtype: str
    shape: tuple[int, ...]
    modality: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the parts fit each other."""
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape {self.shape} has a negative size")
        if self.data.nbytes != payload_bytes(self.dtype, self.shape):
            raise ValueError(
                f"{self.data.nbytes} bytes are no {self.dtype} tensor of shape {self.shape}"
            )


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What an entry's header says.

    Attributes:
        key: the entry's key.
        dtype: `BF16`, `F16` or `F32`.
        shape: usually (tokens, width).
        modality: `image`, `audio` or `video`.
        metadata: placeholder metadata as vLLM reports it; read-only, for others may have the same.
        checksum: xxh3-64 of the payload, 16 hexadecimal digits.
        header_bytes: size of length field and header, where the payload begins.
    """

    key: EntryKey
    dtype: str
    shape: tuple[int, ...]
    modality: str
    metadata: Mapping[str, Any]
    checksum: str
    header_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Size of the tensor."""
        return payload_bytes(self.dtype, self.shape)

    @property
    def size_bytes(self) -> int:
        """Size of the whole blob."""
        return self.header_bytes + self.payload_bytes


def payload_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def encode_header(key: EntryKey, entry: Entry, payload_checksum: str | None = None) -> bytes:
    """Length field and header of an entry's blob; the payload, `entry.data`, follows it.

    Args:
        key: the entry's key.
        entry: the entry.
        payload_checksum: `checksum(entry.data)` where it is known already. The header's length does
            not depend on it.
    """
    known = checksum(entry.data) if payload_checksum is None else payload_checksum
    return _header(key, entry.dtype, entry.shape, entry.modality, entry.metadata, known)


def checksum(payload: memoryview) -> str:
    """xxh3-64 of a payload, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(payload)


def _header(  # noqa: PLR0913, PLR0917 - one for each field of the header
    key: EntryKey,
    dtype: str,
    shape: tuple[int, ...],
    modality: str,
    metadata: Mapping[str, Any],
    payload_checksum: str,
) -> bytes:
    """Deterministic: a header is valid exactly when it is what this makes of its own contents."""
    fields = {
        "format": FORMAT,
        "namespace": _text(key.namespace),
        "identifier": _text(key.identifier),
        "modality": modality,
        "placeholder": orjson.dumps(metadata, option=orjson.OPT_SORT_KEYS).decode(),
        "payload_xxh3": payload_checksum,
    }
    tensor = {
        "dtype": dtype,
        "shape": list(shape),
        "data_offsets": [0, payload_bytes(dtype, shape)],
    }
    fields["header_xxh3"] = xxhash.xxh3_64_hexdigest(orjson.dumps([fields, tensor]))
    text = orjson.dumps({"__metadata__": fields, TENSOR: tensor})
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _text(part: str) -> str:
    """A part of a key as JSON can hold it: percent-encoded, for vLLM lets lone surrogates pass."""
    if _PLAIN.fullmatch(part):  # as most are, and this is sooner known
        return part
    return quote(part, safe=" /:;,=@+()[]", errors="surrogatepass")


def header_length(blob: memoryview) -> int:
    """Bytes of length field and header, from the first 8 bytes of a blob.

    Raises:
        CorruptEntry: there are fewer, or they say what no header has.
    """
    if len(blob) < 8:  # noqa: PLR2004 - the length field
        raise CorruptEntry("shorter than its length field")
    size = int.from_bytes(blob[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise CorruptEntry("its header is too large")
    return 8 + size


def read_header(head: memoryview) -> EntryInfo:
    """Read length field and header; `head` may go on behind them.

    Raises:
        CorruptEntry: this is not what `encode_header` makes.
    """
    end = header_length(head)
    raw = bytes(head[:end])
    return _known(raw) if end <= SHORT_BYTES else _parsed(raw)


def _parsed(raw: bytes) -> EntryInfo:
    try:
        parsed = orjson.loads(raw[8:])
        fields, tensor = parsed["__metadata__"], parsed[TENSOR]
        key = EntryKey(_key_part(fields["namespace"]), _key_part(fields["identifier"]))
        info = EntryInfo(
            key=key,
            dtype=tensor["dtype"],
            shape=tuple(tensor["shape"]),
            modality=fields["modality"],
            metadata=orjson.loads(fields["placeholder"]),
            checksum=fields["payload_xxh3"],
            header_bytes=len(raw),
        )
        expected = _header(key, info.dtype, info.shape, info.modality, info.metadata, info.checksum)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CorruptEntry(f"its header cannot be read: {error}") from None
    if raw != expected:
        raise CorruptEntry("its header is not what it was written as")
    return info


_known = lru_cache(KNOWN_HEADERS)(_parsed)


def _key_part(text: str) -> str:
    return unquote(text, errors="surrogatepass")


def decode(key: EntryKey, blob: memoryview) -> Entry:
    """The entry in a blob, its payload a view of it.

    Raises:
        CorruptEntry: it is not the entry of this key, whole and unchanged.
    """
    info = read_header(blob)
    if info.key != key:
        raise CorruptEntry("it is another key's entry")
    payload = blob[info.header_bytes :]
    if payload.nbytes != info.payload_bytes:
        raise CorruptEntry(f"{payload.nbytes} bytes of payload, not {info.payload_bytes}")
    if checksum(payload) != info.checksum:
        raise CorruptEntry("its checksum does not fit its payload")
    return Entry(payload.toreadonly(), info.dtype, info.shape, info.modality, info.metadata)
