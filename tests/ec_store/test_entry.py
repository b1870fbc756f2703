"""Entry format and keys."""

import copy
import json
import math
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import orjson
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ec_store import CorruptEntry, Entry, EntryKey
from ec_store.entry import ITEM_BYTES, checksum, decode, encode_header, payload_bytes, read_header
from ec_store.errors import OtherFormat
from ec_store.testing.stores import another_release
from tests.ec_store.entries import entry
from tests.examples import scaled

KEY = EntryKey("ns", "k")


keys = st.builds(
    EntryKey, st.text(st.characters()), st.text(st.characters()) | st.just("\ud800../\0")
)


metadata = st.dictionaries(
    st.text(),
    st.lists(st.integers(-(2**31), 2**31) | st.floats(allow_nan=False, allow_infinity=False)),
    max_size=4,
)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    size = payload_bytes(dtype, shape)
    data = draw(st.binary(min_size=size, max_size=size))
    return Entry(memoryview(data), dtype, shape, draw(st.text()), draw(metadata))


def blob(key: EntryKey = KEY, value: Entry | None = None) -> bytes:
    value = value or entry()
    return encode_header(key, value, checksum(value.data)) + value.data


@given(keys, entries())
def test_decode_returns_any_encoded_entry(key: EntryKey, value: Entry) -> None:
    assert decode(key, memoryview(blob(key, value))) == value


@pytest.mark.fault(20)
@pytest.mark.security("S16")
@pytest.mark.parametrize("flip", [0x01, 0x08, 0x20, 0x80, 0xFF])
def test_every_changed_byte_is_corrupt(flip: int) -> None:
    whole = blob()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= flip
        with pytest.raises(CorruptEntry):
            decode(KEY, memoryview(changed))


@pytest.mark.fault(20)
def test_a_header_may_lack_a_checksum_and_then_a_blob_is_corrupt() -> None:
    header = encode_header(KEY, entry(), "")

    assert read_header(memoryview(header)).checksum == ""
    with pytest.raises(CorruptEntry, match="does not match its payload"):
        decode(KEY, memoryview(header + entry().data))


def test_a_cached_header_is_still_checked() -> None:
    whole = blob()
    for position in range(len(whole)):
        decode(KEY, memoryview(whole))
        changed = bytearray(whole)
        changed[position] ^= 1
        with pytest.raises(CorruptEntry):
            decode(KEY, memoryview(changed))


@pytest.mark.fault(20)
@pytest.mark.fault(24)
@pytest.mark.security("S16")
def test_decode_rejects_truncated_and_extended_entries() -> None:
    whole = blob()
    for length in range(len(whole)):
        with pytest.raises(CorruptEntry):
            decode(KEY, memoryview(whole[:length]))
    with pytest.raises(CorruptEntry):
        decode(KEY, memoryview(whole + b"x"))


@given(st.binary())
@pytest.mark.security("S16")
def test_any_bytes_are_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptEntry):
        decode(KEY, memoryview(raw))


@pytest.mark.fault(20)
@pytest.mark.security("S16")
@given(st.binary(max_size=200))
def test_any_header_is_read_or_corrupt(text: bytes) -> None:
    with pytest.raises(CorruptEntry):
        read_header(memoryview(len(text).to_bytes(8, "little") + text))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-3, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["BF16", "F32", "0" * 16, "{}", "[]", "null", "ec_store/2"])
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
) | st.sampled_from([3.0, 4.0, -3.0, -3, -4, True, [3.0, 4.0], [-3, -4], [3, 4.0], [[3], 4], "abc"])


FIELDS = [
    ("__metadata__",),
    ("ec_cache",),
    *(("__metadata__", name) for name in ("format", "namespace", "identifier", "modality")),
    *(("__metadata__", name) for name in ("placeholder", "payload_xxh3", "header_xxh3", "more")),
    *(("ec_cache", name) for name in ("dtype", "shape", "data_offsets", "more")),
    ("ec_cache", "shape", 0),
    ("ec_cache", "shape", 1),
    ("ec_cache", "data_offsets", 1),
]


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Return a header with any JSON value in one or two fields, and what a writer derives."""
    header = json.loads(blob()[8:].partition(b" ")[0].rpartition(b"}}")[0] + b"}}")
    changes = draw(
        st.lists(st.tuples(st.sampled_from(FIELDS), json_values), min_size=1, max_size=2)
    )
    for path, drawn in changes:
        in_text = path[-1] == "placeholder" and draw(st.booleans())
        value = orjson.dumps(drawn).decode() if in_text else copy.deepcopy(drawn)
        with suppress(TypeError, KeyError, IndexError):  # an earlier value replaced its parent
            place: Any = header
            for step in path[:-1]:
                place = place[step]
            if isinstance(path[-1], str) == isinstance(place, dict):
                place[path[-1]] = value
    changed = {".".join(map(str, path[1:])) for path, _ in changes}
    fields: Any = header["__metadata__"]
    tensor: Any = header["ec_cache"]
    with suppress(TypeError, KeyError, IndexError, ValueError, AttributeError):
        if not changed & {"data_offsets", "data_offsets.1"}:
            # A text times a number would be as long as the number is large.
            sizes = [0 if isinstance(size, str | list) else size for size in tensor["shape"]]
            size = math.prod(sizes) * ITEM_BYTES[tensor["dtype"]]
            tensor["data_offsets"] = json.loads(orjson.dumps([0, size]))
        if "header_xxh3" not in changed:
            rest = {name: value for name, value in fields.items() if name != "header_xxh3"}
            digest = xxhash.xxh3_64_hexdigest(orjson.dumps([rest, tensor]))
            header["__metadata__"] = rest | {"header_xxh3": digest}
    text = orjson.dumps(header)
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


@pytest.mark.fault(20)
@pytest.mark.security("S16")
@settings(max_examples=scaled(300))
@given(headers())
def test_any_value_in_a_consistent_header_is_corrupt_or_a_valid_entry(header: bytes) -> None:
    try:
        info = read_header(memoryview(header))
    except CorruptEntry:
        return
    assert type(info.key.namespace) is type(info.key.identifier) is str
    assert type(info.modality) is type(info.checksum) is str
    assert info.dtype in ITEM_BYTES
    assert all(type(size) is int and size >= 0 for size in info.shape)
    assert type(info.metadata) is dict
    if info.payload_bytes < 2**20:
        payload = bytes(info.payload_bytes)
        body = encode_header(info.key, info, checksum(memoryview(payload))) + payload
        assert decode(info.key, memoryview(body)).shape == info.shape


@pytest.mark.fault(93)
def test_only_a_header_of_another_format_is_of_another_format() -> None:
    mine = blob()
    with another_release("ec_store/12"):
        other = blob()
    with pytest.raises(OtherFormat, match="ec_store/12"):
        decode(KEY, memoryview(other))
    for changed in (
        mine.replace(b"ec_store/1", b"ec_store/2"),
        mine.replace(b"store/1", b"storf/1"),
    ):
        with pytest.raises(CorruptEntry) as raised:
            decode(KEY, memoryview(changed))
        assert raised.type is CorruptEntry


@pytest.mark.fault(20)
@pytest.mark.fault(28)
@pytest.mark.security("S16")
def test_decode_rejects_the_entry_of_another_key() -> None:
    for other in (EntryKey("ns", "other"), EntryKey("other", "k")):
        with pytest.raises(CorruptEntry):
            decode(other, memoryview(blob()))


def test_decode_rejects_a_header_in_another_spelling() -> None:
    """Each entry has exactly one encoding."""
    whole = blob()
    size = 8 + int.from_bytes(whole[:8], "little")
    text = json.dumps(json.loads(whole[8:size])).encode()
    with pytest.raises(CorruptEntry):
        decode(KEY, memoryview(len(text).to_bytes(8, "little") + text + whole[size:]))


def test_the_payload_is_aligned() -> None:
    for length in range(70):
        assert len(encode_header(EntryKey("n" * length, "k"), entry(), "0" * 16)) % 64 == 0


def test_a_safetensors_reader_opens_it() -> None:
    """The blob is a safetensors file: length, JSON with offsets and string metadata, data."""
    whole = blob()
    size = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:size])
    start, end = header["ec_cache"]["data_offsets"]

    assert set(header) == {"__metadata__", "ec_cache"}
    assert all(isinstance(value, str) for value in header["__metadata__"].values())
    assert header["ec_cache"]["dtype"] == "BF16"
    assert whole[size:][start:end] == entry().data
    assert size + end == len(whole)


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [("I64", (1,), b"12345678"), ("BF16", (2,), b"123"), ("F32", (-1,), b"")],
)
def test_parts_that_do_not_fit_make_no_entry(
    dtype: str, shape: tuple[int, ...], data: bytes
) -> None:
    with pytest.raises(ValueError, match=r"dtype|shape"):
        Entry(memoryview(data), dtype, shape, "image")


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": (3.0, 4)},
        {"shape": (True, 12)},
        {"modality": None},
        {"metadata": [1]},
        {"dtype": ["BF16"]},
    ],
)
def test_values_of_the_wrong_type_make_no_entry(fields: Any) -> None:
    whole = {"dtype": "BF16", "shape": (3, 4), "modality": "image", "metadata": {}} | fields
    with pytest.raises(ValueError, match=next(iter(fields))):
        Entry(memoryview(bytes(24)), **whole)


def test_plain_and_quoted_strings_make_the_same_header() -> None:
    """Both paths must write the same header."""
    for number in [*range(0x250), 0x2028, 0xD800, 0x1F600]:
        header = encode_header(EntryKey(chr(number), "k"), entry(), "0" * 16)
        quoted = quote(chr(number), safe=" /:;,=@+()[]", errors="surrogatepass")

        assert json.loads(header[8:])["__metadata__"]["namespace"] == quoted
