"""Assignment of items to instances by cost."""

from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from epd.routing.balance import spread_costs

some_costs = st.lists(st.integers(1, 20000), min_size=1, max_size=16)
few_costs = st.lists(st.integers(1, 50), min_size=1, max_size=7)
some_instances = st.lists(
    st.tuples(st.integers(0, 40000), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=5
)


def ends_of(
    costs: Sequence[float], places: Sequence[int], busy: Sequence[float], shares: Sequence[float]
) -> list[float]:
    """Return the time at which each instance has done its work."""
    work = list(busy)
    for cost, place in zip(costs, places, strict=True):
        work[place] += cost
    return [done / share for done, share in zip(work, shares, strict=True)]


def last_end(costs: Sequence[float], places: Sequence[int], count: int) -> float:
    return max(ends_of(costs, places, [0.0] * count, [1.0] * count))


@given(few_costs, st.integers(1, 3))
def test_idle_instances_finish_at_most_a_third_later_than_the_best_assignment(
    costs: list[int], count: int
) -> None:
    places = spread_costs(costs, [0.0] * count, [1.0] * count)

    best = min(last_end(costs, some, count) for some in product(range(count), repeat=len(costs)))
    assert 3 * last_end(costs, places, count) <= 4 * best


@given(some_costs, st.integers(1, 8))
def test_the_last_item_to_end_begins_before_all_instances_can_have_ended(
    costs: list[int], count: int
) -> None:
    """Bound of the rule for any number of items: it ends within the mean and one item."""
    places = spread_costs(costs, [0.0] * count, [1.0] * count)

    bound = sum(costs) / count + max(costs) * (1 - 1 / count)
    assert last_end(costs, places, count) <= bound + 1e-6


@given(some_costs, some_instances)
def test_every_item_has_one_instance_and_the_result_is_always_the_same(
    costs: list[int], instances: list[tuple[int, float]]
) -> None:
    busy, shares = zip(*instances, strict=True)
    places = spread_costs(costs, busy, shares)

    assert len(places) == len(costs)
    assert set(places) <= set(range(len(instances)))
    assert spread_costs(costs, busy, shares) == places


@given(some_costs, some_instances)
def test_no_instance_would_end_an_item_of_the_last_one_earlier(
    costs: list[int], instances: list[tuple[int, float]]
) -> None:
    busy, shares = zip(*instances, strict=True)
    places = spread_costs(costs, busy, shares)

    ends = ends_of(costs, places, busy, shares)
    for place, end in enumerate(ends):
        least = min(
            (cost for cost, at in zip(costs, places, strict=True) if at == place), default=0
        )
        others = [other + least / share for other, share in zip(ends, shares, strict=True)]
        others[place] = end
        assert end <= min(others) + 1e-6 or not least


def test_items_are_spread_by_cost_and_not_by_count() -> None:
    assert spread_costs([100, 10, 10, 10, 10, 60], [0, 0], [1, 1]) == [0, 1, 1, 1, 1, 1]


def test_work_under_way_counts() -> None:
    assert spread_costs([10, 10, 10], [0, 15], [1, 1]) == [0, 0, 1]


def test_a_faster_instance_gets_more() -> None:
    assert spread_costs([10] * 4, [0, 0], [3, 1]) == [0, 0, 0, 1]


def test_equal_items_and_instances_are_assigned_in_their_order() -> None:
    assert spread_costs([5, 5, 5, 5], [0, 0], [1, 1]) == [0, 1, 0, 1]
