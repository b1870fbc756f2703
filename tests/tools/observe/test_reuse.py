import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.tools.observe.reuse import HASHES, ReuseDistances
from scripts.bench_observe import lru_hits, traces

SIZES = (1.0, 3.0, 7.0, 20.0, math.inf)


def spread(item: int) -> int:
    """Return a uniform hash of an item."""
    return random.Random(item).getrandbits(64)  # noqa: S311 - a test


@given(st.lists(st.integers(0, 12), max_size=300))
def test_every_size_of_cache_has_the_hits_of_a_real_one(items: list[int]) -> None:
    distances = ReuseDistances(SIZES)
    for item in items:
        distances.refer(item, 1.0)

    for size in SIZES:
        assert distances.hits(size) == lru_hits([(item, 1.0) for item in items], size)
    assert distances.distinct == len({*items})


@given(st.lists(st.integers(0, 12), max_size=200))
def test_large_items_take_the_room_of_small_ones(items: list[int]) -> None:
    trace = [(item, 1.0 + item % 3) for item in items]
    distances = ReuseDistances(SIZES)
    for item, size in trace:
        distances.refer(item, size)

    for size in SIZES:
        # A real cache also evicts for an item that it then cannot keep.
        assert distances.hits(size) >= lru_hits(trace, size)
    assert distances.hits(math.inf) == lru_hits(trace, math.inf)


def test_positions_are_numbered_again_without_a_change_of_distances() -> None:
    distances = ReuseDistances((3.0,))
    for _ in range(5000):  # more than the first tree has
        for item in range(3):
            distances.refer(item, 1.0)

    assert distances.hits(3.0) == 3 * 5000 - 3


@pytest.mark.parametrize("most", [500, 2000])
def test_the_number_of_sampled_items_is_bounded(most: int) -> None:
    numbers = random.Random(7)  # noqa: S311 - a test
    trace = [numbers.randrange(20_000) for _ in range(100_000)]
    distances = ReuseDistances((5_000.0, math.inf), most=most)
    for item in trace:
        distances.refer(spread(item), 1.0)

    assert distances.share == pytest.approx(most / 20_000, rel=0.15)
    assert distances.distinct == pytest.approx(len({*trace}), rel=0.1)
    real = lru_hits([(item, 1.0) for item in trace], 5_000) / len(trace)
    assert distances.hits(5_000.0) / len(trace) == pytest.approx(real, abs=0.05)


def test_a_sample_with_too_many_or_too_few_items_predicts_as_well() -> None:
    for name, trace in traces(20_000, seed=1):
        stores = [sum(dict(trace).values()) * part for part in (0.2, 0.5)]
        distances = ReuseDistances(stores, share=0.1)
        for item, size in trace:
            distances.refer(spread(item), size)

        assert distances.distinct == pytest.approx(len(dict(trace)), rel=0.005)
        for store in stores:
            real = lru_hits(trace, store)
            assert distances.hits(store) == pytest.approx(real, abs=0.035 * len(trace)), name


def test_an_item_has_the_origin_of_its_reference_before() -> None:
    distances = ReuseDistances()

    first = distances.refer(1, 1.0, ("a", 0))
    again = distances.refer(1, 1.0, ("b", 1))

    assert first is not None
    assert first.earlier is None
    assert again is not None
    assert (again.earlier, again.distance, again.weight) == (("a", 0), 1.0, 1.0)


def test_an_item_outside_the_sample_is_counted_alone() -> None:
    distances = ReuseDistances(share=0.5)

    assert distances.refer(HASHES - 1, 1.0) is None
    assert distances.references == 1
