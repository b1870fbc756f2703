"""Entry format and keys."""

import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store import CorruptEntry, Entry, EntryKey
from ec_store.config import duration_s, parameters, redacted, size_bytes
from ec_store.entry import ITEM_BYTES, checksum, decode, encode_header, payload_bytes, read_header
from ec_store.keys import MAX_PART_BYTES
from tests.ec_store.entries import entry

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


@given(keys, keys)
def test_digests_are_equal_exactly_where_keys_are(one: EntryKey, other: EntryKey) -> None:
    assert (one == other) == (one.digest == other.digest)
    assert len(one.digest) == 64


def test_parts_of_a_key_do_not_run_together() -> None:
    assert EntryKey("a", "bc").digest != EntryKey("ab", "c").digest


def test_entry_key_rejects_identifiers_longer_than_a_header() -> None:
    with pytest.raises(ValueError, match="longer"):
        EntryKey("ns", "x" * 70_000)


@pytest.mark.parametrize("character", ["x", "\xe9", "\u20ac", "\U0001f600", "\ud800"])
def test_entry_key_bounds_the_bytes_of_its_parts(character: str) -> None:
    longest = MAX_PART_BYTES // len(character.encode("utf-8", "surrogatepass"))
    EntryKey("ns", character * longest)
    with pytest.raises(ValueError, match="longer"):
        EntryKey("ns", character * (longest + 1))


def test_plain_and_quoted_strings_make_the_same_header() -> None:
    """Both paths must write the same header."""
    for number in [*range(0x250), 0x2028, 0xD800, 0x1F600]:
        header = encode_header(EntryKey(chr(number), "k"), entry(), "0" * 16)
        quoted = quote(chr(number), safe=" /:;,=@+()[]", errors="surrogatepass")

        assert json.loads(header[8:])["__metadata__"]["namespace"] == quoted


def test_quantities_of_urls() -> None:
    assert size_bytes("64GiB") == 64 * 2**30
    assert size_bytes("1.5 mb") == 1_500_000
    assert duration_s("7d") == 7 * 86400
    assert duration_s("20ms") == 0.02
    for wrong in ("", "x", "-1", "1 parsec", "1e3"):
        with pytest.raises(ValueError, match="is not a"):
            size_bytes(wrong)


def test_parameters_of_urls() -> None:
    known = {"ttl": duration_s}
    assert parameters("file:///x?ttl=1s", known) == {"ttl": 1.0}
    for wrong in ("file:///x?tll=1s", "file:///x?ttl=1s&ttl=2s", "file:///x?ttl=soon"):
        with pytest.raises(ValueError, match="parameter"):
            parameters(wrong, known)


def test_a_password_is_not_shown() -> None:
    for password in ("secret", "sec@ret", "sec/ret"):
        assert redacted(f"rediss://user:{password}@host/0") == "rediss://***@host/0"
