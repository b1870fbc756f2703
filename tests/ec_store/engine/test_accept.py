"""Shapes of entries that fit an item, and values that are not finite."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/test.sh installs it")

from ec_store import Entry  # noqa: E402 - only with torch
from ec_store.engine.accept import (  # noqa: E402
    PIECE_BYTES,
    ItemTarget,
    find_misfit,
    is_finite,
)

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def stored(tensor: Any) -> Entry:
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    dtype = next(name for name, one in DTYPES.items() if one == tensor.dtype)
    return Entry(memoryview(raw), dtype, tuple(tensor.shape), "image")


sizes = st.integers(0, 5)


@given(
    shape=st.lists(sizes, max_size=4).map(tuple),
    dtype=st.sampled_from(["BF16", "F16", "F32"]),
    rows=sizes,
    columns=st.none() | sizes,
)
def test_an_entry_fits_exactly_where_dtype_rows_and_columns_are_those_expected(
    shape: tuple[int, ...], dtype: str, rows: int, columns: int | None
) -> None:
    size = math.prod(shape) * (4 if dtype == "F32" else 2)
    entry = Entry(memoryview(bytes(size)), dtype, shape, "image")
    found = find_misfit(entry, ItemTarget("a", "image", "F32", rows, columns))
    assert (found is None) == (dtype == "F32" and shape == (rows, columns))


@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    count=st.integers(1, 9),
    data=st.data(),
)
def test_values_that_are_not_finite_are_found_by_their_bits(
    dtype: str, count: int, data: st.DataObject
) -> None:
    size = 4 if dtype == "F32" else 2
    raw = data.draw(st.binary(min_size=count * size, max_size=count * size))
    tensor = torch.frombuffer(bytearray(raw), dtype=DTYPES[dtype])
    entry = Entry(memoryview(raw), dtype, (1, count), "image")
    assert is_finite(entry) == bool(tensor.isfinite().all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_value_that_is_not_finite_is_found_at_any_position(
    dtype: str, value: float
) -> None:
    """The values are at the ends of the tensor, and of the pieces that are checked in turn."""
    width = 4 if dtype == "F32" else 2
    piece = PIECE_BYTES // width
    count = 2 * piece + 3
    largest = torch.finfo(DTYPES[dtype]).max
    tensor = torch.full((1, count), largest, dtype=DTYPES[dtype])
    tensor[0, ::2] = -largest
    assert is_finite(stored(tensor))
    for place in (0, piece - 1, piece, 2 * piece, count - 1):
        spoiled = tensor.clone()
        spoiled[0, place] = value
        assert not is_finite(stored(spoiled))


def test_an_entry_without_values_is_finite() -> None:
    assert is_finite(stored(torch.ones(0, 8)))
