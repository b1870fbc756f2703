import hypothesis.strategies as st
import pytest
from hypothesis import given

from ec_store.arena.extents import PAGE_BYTES
from ec_store.engine.slots import Slots

SIZES = st.integers(0, 5 * PAGE_BYTES)


@given(st.integers(0, 20 * PAGE_BYTES), st.lists(st.tuples(SIZES, st.integers(0, 100))))
def test_slots_are_disjoint_within_bounds_and_all_released(
    size: int, steps: list[tuple[int, int]]
) -> None:
    slots = Slots(size)
    taken: dict[int, int] = {}
    for wanted, index in steps:
        offset = slots.take_slot(wanted)
        if offset is not None:
            assert offset % PAGE_BYTES == 0
            assert offset + wanted <= size
            assert all(offset + wanted <= at or at + other <= offset for at, other in taken.items())
            assert offset not in taken
            taken[offset] = wanted
        elif taken:
            given_back = sorted(taken)[index % len(taken)]
            slots.free_slot(given_back)
            del taken[given_back]
    for offset in taken:
        slots.free_slot(offset)

    assert slots.taken_bytes() == 0
    if size >= PAGE_BYTES:
        assert slots.take_slot(size - size % PAGE_BYTES) == 0


def test_a_full_region_has_no_slot_until_one_is_released() -> None:
    slots = Slots(3 * PAGE_BYTES)
    places = [slots.take_slot(PAGE_BYTES) for _ in range(4)]
    assert places == [0, PAGE_BYTES, 2 * PAGE_BYTES, None]

    slots.free_slot(0)
    slots.free_slot(2 * PAGE_BYTES)
    assert slots.taken_bytes() == PAGE_BYTES
    assert slots.take_slot(PAGE_BYTES + 1) is None
    slots.free_slot(PAGE_BYTES)
    assert slots.take_slot(3 * PAGE_BYTES) == 0


@pytest.mark.parametrize("size", [0, PAGE_BYTES - 1])
def test_memory_below_a_page_has_no_place(size: int) -> None:
    assert Slots(size).take_slot(1) is None
