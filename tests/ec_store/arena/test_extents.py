import math
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_store.arena.extents import MAX_EXTENTS, PAGE_BYTES, Extent, ExtentAllocator

SEGMENT = 16 * PAGE_BYTES
SIZES = st.integers(0, 40 * PAGE_BYTES)
STEPS = st.lists(st.one_of(SIZES, st.integers(0, 30).map(lambda n: -n - 1)), max_size=80)


def pages(extents: list[Extent]) -> list[int]:
    return [
        page
        for offset, size_bytes in extents
        for page in range(offset // PAGE_BYTES, (offset + size_bytes) // PAGE_BYTES)
    ]


@given(size_bytes=st.integers(0, 100 * PAGE_BYTES), steps=STEPS)
def test_every_page_is_in_one_entry_or_in_one_hole(size_bytes: int, steps: list[int]) -> None:
    allocator = ExtentAllocator(size_bytes, SEGMENT)
    entries: list[tuple[Extent, ...]] = []
    for step in steps:
        if step < 0:
            if entries:
                allocator.free(entries.pop(-step % len(entries)))
            continue
        wanted = max(1, math.ceil(step / PAGE_BYTES)) * PAGE_BYTES
        free = allocator.free_bytes
        extents = allocator.allocate(step)
        if extents is None:
            assert wanted > free or len(list(allocator.holes())) > MAX_EXTENTS
            continue
        entries.append(extents)
        assert sum(extent.size_bytes for extent in extents) == wanted
        assert allocator.free_bytes == free - wanted
    holes = list(allocator.holes())
    taken = [extent for extents in entries for extent in extents]

    assert sorted(pages(taken) + pages(holes)) == list(range(size_bytes // PAGE_BYTES))
    assert allocator.free_bytes == sum(hole.size_bytes for hole in holes)
    for offset, size in taken:
        assert offset // SEGMENT == (offset + size - 1) // SEGMENT
    for extents in entries:
        allocator.free(extents)
    assert len(list(allocator.holes())) == math.ceil(
        size_bytes // PAGE_BYTES * PAGE_BYTES / SEGMENT
    )


def test_an_entry_takes_the_smallest_hole_that_it_fits_into() -> None:
    allocator = ExtentAllocator(10 * PAGE_BYTES, 10 * PAGE_BYTES)
    placed = [allocator.allocate(size * PAGE_BYTES) for size in (3, 1, 2, 1, 3)]
    for extents in placed[::2]:
        allocator.free(extents or ())

    assert allocator.allocate(2 * PAGE_BYTES) == (Extent(4 * PAGE_BYTES, 2 * PAGE_BYTES),)


def test_an_entry_that_fits_into_no_hole_takes_the_largest_ones() -> None:
    allocator = ExtentAllocator(10 * PAGE_BYTES, 10 * PAGE_BYTES)
    placed = [allocator.allocate(size * PAGE_BYTES) for size in (3, 1, 2, 1, 3)]
    for extents in placed[::2]:
        allocator.free(extents or ())

    assert allocator.allocate(5 * PAGE_BYTES) == (
        Extent(7 * PAGE_BYTES, 3 * PAGE_BYTES),
        Extent(0, 2 * PAGE_BYTES),
    )


@pytest.mark.parametrize(("holes", "fits"), [(MAX_EXTENTS, True), (MAX_EXTENTS + 1, False)])
def test_an_entry_is_in_a_bounded_number_of_extents(holes: int, fits: bool) -> None:
    size = 2 * holes * PAGE_BYTES
    allocator = ExtentAllocator(size, size)
    placed = [allocator.allocate(PAGE_BYTES) for _ in range(2 * holes)]
    for extents in placed[::2]:
        allocator.free(extents or ())

    assert (allocator.allocate(holes * PAGE_BYTES) is not None) is fits
    assert allocator.free_bytes == (0 if fits else holes * PAGE_BYTES)


def test_a_full_memory_with_entries_of_all_sizes_is_used() -> None:
    """The share of the memory that is in entries, after each of many evictions and writes."""
    size = 2 * 2**30
    allocator, rng = ExtentAllocator(size, 2**30), random.Random(1)  # noqa: S311
    entries: deque[tuple[tuple[Extent, ...], int]] = deque()
    used, lowest = 0, size
    for turn in range(5000):
        wanted = int(math.exp(rng.uniform(math.log(64 * 2**10), math.log(150e6))))
        while (extents := allocator.allocate(wanted)) is None:
            oldest, oldest_bytes = entries.popleft()
            allocator.free(oldest)
            used -= oldest_bytes
        entries.append((extents, wanted))
        used += wanted
        if turn > 1000:
            lowest = min(lowest, used)

    assert lowest > 0.9 * size


@pytest.mark.parametrize("segment_bytes", [0, -PAGE_BYTES, PAGE_BYTES + 1])
def test_a_segment_has_whole_pages(segment_bytes: int) -> None:
    with pytest.raises(ValueError, match="segment"):
        ExtentAllocator(PAGE_BYTES, segment_bytes)
