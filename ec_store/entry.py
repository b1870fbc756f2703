"""Entry and its format: one blob that any safetensors reader opens.

    8 bytes     length of the header, little-endian
    header      JSON, padded with spaces to a multiple of 64 bytes, the length field included
    payload     the tensor's bytes, little-endian, row-major

The header names the tensor `ec_cache`. Its `__metadata__` holds all that a reader needs to verify
the entry (docs/store-format.md). Safetensors: https://github.com/huggingface/safetensors#format
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import quote, unquote

import orjson
import xxhash

from ec_store.errors import CorruptEntry, OtherFormat
from ec_store.keys import EntryKey

TENSOR = "ec_cache"
FORMAT = "ec_store/1"
ALIGNMENT = 64
"""Length field and header end on a multiple of this many bytes, so that a mapped payload is
aligned."""

MAX_HEADER_BYTES = 1024**2
KNOWN_HEADERS = 1024
SHORT_BYTES = 1024
"""Largest header in bytes that is cached. The cache holds `KNOWN_HEADERS` parsed headers, some 2
MB: each turn of a chat looks up the same images, and their headers are not parsed again."""

_PLAIN = re.compile(r"[\w.~ /:;,=@+()\[\]-]*", re.ASCII)
_ANY_FORMAT = re.compile(r"ec_store/\d{1,9}", re.ASCII)
_CHECKSUM = re.compile(r"([0-9a-f]{16})?", re.ASCII)
ITEM_BYTES: Mapping[str, int] = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes of one value of each supported dtype, by its safetensors name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Encoder output.

    Attributes:
        data: bytes of the tensor, little-endian, row-major; read-only if the entry comes from a
            store, where it may be a view of a larger buffer.
        dtype: `BF16`, `F16` or `F32`.
        shape: usually (tokens, width).
        modality: `image`, `audio` or `video`.
        metadata: placeholder metadata as vLLM reports it, such as `{"image_grid_thw": [1, 36,
            54]}`; JSON values, read-only if the entry comes from a store.
        encode_s: seconds that the encode took on the device, for eviction; 0: unknown, as in an
            entry that comes from a store. No part of the blob: it does not describe the output.

    Raises:
        ValueError: a field has the wrong type, or dtype, shape and length are inconsistent.
    """

    data: memoryview
    dtype: str
    shape: tuple[int, ...]
    modality: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    encode_s: float = field(default=0.0, compare=False)

    @property
    def parts(self) -> Sequence[memoryview]:
        """Return its bytes, in order; those of an entry in a host's memory may be in several."""
        return (self.data,)

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.data.nbytes != payload_bytes(self.dtype, self.shape):
            raise ValueError(
                f"{self.data.nbytes} bytes do not make a {self.dtype} tensor of shape {self.shape}"
            )


class HeldEntry(Protocol):
    """Entry with its bytes in memory: an `Entry`, or a part of a host's memory.

    The attributes are those of `Entry`.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def modality(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def parts(self) -> Sequence[memoryview]: ...
    @property
    def encode_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """Fields of an entry's header.

    Attributes:
        dtype, shape, modality: as in `Entry`.
        metadata: as in `Entry`; read-only, since callers share it.
        checksum: xxh3-64 of the payload, 16 hexadecimal digits. A host's memory keeps it beside the
            header, where it is empty. In every other store an empty one is corrupt.
        header_bytes: size of length field and header, the offset of the payload.

    Raises:
        ValueError: a field has the wrong type.
    """

    key: EntryKey
    dtype: str
    shape: tuple[int, ...]
    modality: str
    metadata: Mapping[str, Any]
    checksum: str
    header_bytes: int

    def __post_init__(self) -> None:
        _check_fields(self)
        if not _CHECKSUM.fullmatch(self.checksum):
            raise ValueError(f"checksum {self.checksum!r:.40} is not 16 hexadecimal digits")

    @property
    def payload_bytes(self) -> int:
        return payload_bytes(self.dtype, self.shape)

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole blob in bytes."""
        return self.header_bytes + self.payload_bytes


def _check_fields(entry: Entry | EntryInfo) -> None:
    """Raise ValueError for a field of the wrong type.

    JSON has more values than the fields may have: `4.0 == 4` and `True == 1`, but a tensor of such
    a shape raises where the model runs, which ends the engine.
    """
    if type(entry.dtype) is not str or entry.dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {entry.dtype!r:.40} is not one of {', '.join(ITEM_BYTES)}")
    if not all(type(size) is int and size >= 0 for size in entry.shape):
        raise ValueError(f"shape {entry.shape!r:.80} has a size that is not an integer from 0 on")
    if not isinstance(entry.modality, str):
        raise ValueError(f"modality {entry.modality!r:.40} is not a text")  # noqa: TRY004
    if not isinstance(entry.metadata, Mapping):
        raise ValueError(f"metadata {entry.metadata!r:.40} are not an object")  # noqa: TRY004


def payload_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def checksum(payload: memoryview) -> str:
    """Return the xxh3-64 of a payload, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(payload)


def encode_header(key: EntryKey, entry: HeldEntry | EntryInfo, payload_checksum: str) -> bytes:
    """Return length field and header of an entry's blob; the payload follows it.

    The result is deterministic: a valid header equals the one of its own fields. Its length does
    not depend on the checksum.
    """
    fields = {
        "format": FORMAT,
        "namespace": _text(key.namespace),
        "identifier": _text(key.identifier),
        "modality": entry.modality,
        "placeholder": orjson.dumps(entry.metadata, option=orjson.OPT_SORT_KEYS).decode(),
        "payload_xxh3": payload_checksum,
    }
    tensor = {
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "data_offsets": [0, payload_bytes(entry.dtype, entry.shape)],
    }
    fields["header_xxh3"] = xxhash.xxh3_64_hexdigest(orjson.dumps([fields, tensor]))
    text = orjson.dumps({"__metadata__": fields, TENSOR: tensor})
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _text(part: str) -> str:
    """Return a part of a key as JSON text, percent-encoded: vLLM allows lone surrogates."""
    if _PLAIN.fullmatch(part):  # most parts match, and this test is fast
        return part
    return quote(part, safe=" /:;,=@+()[]", errors="surrogatepass")


def header_length(blob: bytes | memoryview) -> int:
    """Return the size of length field and header, from the first 8 bytes of a blob.

    Raises:
        CorruptEntry: the blob is shorter than 8 bytes, or the size is above `MAX_HEADER_BYTES`.
    """
    if len(blob) < 8:  # noqa: PLR2004 - the length field
        raise CorruptEntry("shorter than its length field")
    size = int.from_bytes(blob[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise CorruptEntry("its header is too large")
    return 8 + size


def read_header(head: bytes | memoryview, digest: str | None = None) -> EntryInfo:
    """Parse length field and header; `head` may be longer than they are.

    Args:
        head: first bytes of a blob.
        digest: digest of the key that the entry must have; None: any.

    Raises:
        CorruptEntry: the bytes differ from the output of `encode_header`, or are of another key.
        OtherFormat: the header is of another format.
    """
    raw = bytes(head[: header_length(head)])
    info = _known(raw) if len(raw) <= SHORT_BYTES else _parsed(raw)
    if digest is not None and info.key.digest != digest:
        raise CorruptEntry("it is another key's entry")
    return info


def _parsed(raw: bytes) -> EntryInfo:
    found: Any = None
    try:
        parsed = orjson.loads(raw[8:])
        fields = parsed["__metadata__"]
        found = fields["format"]
        tensor = parsed[TENSOR]
        info = EntryInfo(
            key=EntryKey(_key_part(fields["namespace"]), _key_part(fields["identifier"])),
            dtype=tensor["dtype"],
            shape=tuple(tensor["shape"]),
            modality=fields["modality"],
            metadata=orjson.loads(fields["placeholder"]),
            checksum=fields["payload_xxh3"],
            header_bytes=len(raw),
        )
        expected = encode_header(info.key, info, info.checksum)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        _check_format(found)
        raise CorruptEntry(f"its header cannot be read: {error}") from None
    if raw != expected:
        # This format's checksum: an entry of this format, and a bit of `format` was changed.
        if fields.get("header_xxh3") != orjson.loads(expected[8:])["__metadata__"]["header_xxh3"]:
            _check_format(found)
        raise CorruptEntry("its header is not the one that its fields make")
    return info


def _check_format(found: Any) -> None:
    """Raise OtherFormat if a header's `format` is that of another release."""
    if found != FORMAT and isinstance(found, str) and _ANY_FORMAT.fullmatch(found):
        raise OtherFormat(f"its format is {found}, and this release reads {FORMAT}") from None


_known = lru_cache(KNOWN_HEADERS)(_parsed)


def _key_part(text: str) -> str:
    return unquote(text, errors="surrogatepass")


def decode(key: EntryKey, blob: memoryview) -> Entry:
    """Return the entry in a blob; its payload is a view of the blob.

    Raises:
        CorruptEntry: the blob is not the whole, unchanged entry of this key.
    """
    info = read_header(blob)
    if info.key != key:
        raise CorruptEntry("it is another key's entry")
    payload = blob[info.header_bytes :]
    if payload.nbytes != info.payload_bytes:
        raise CorruptEntry(f"{payload.nbytes} bytes of payload, not {info.payload_bytes}")
    return verified_entry(info, payload, checksum(payload))


def verified_entry(info: EntryInfo, payload: memoryview, payload_checksum: str) -> Entry:
    """Return the entry of a header and a payload. Raise CorruptEntry for another checksum."""
    if payload_checksum != info.checksum:
        raise CorruptEntry("its checksum does not match its payload")
    return Entry(payload.toreadonly(), info.dtype, info.shape, info.modality, info.metadata)
