"""Keys of entries: their digests and bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store import EntryKey
from ec_store.keys import MAX_PART_BYTES

keys = st.builds(
    EntryKey, st.text(st.characters()), st.text(st.characters()) | st.just("\ud800../\0")
)


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
