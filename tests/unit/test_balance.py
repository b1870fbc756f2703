"""Which instance an item goes to."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.routing.balance import BALANCES, LOAD_FACTOR, Affinity, BalanceName, LeastLoad, RoundRobin
from epd.routing.instances import Instance, Role

INSTANCES = [Instance(Role.ENCODE, f"http://e{number}:1") for number in range(5)]
LOADS = st.dictionaries(st.sampled_from(INSTANCES), st.integers(0, 50))
KEYS = [f"key-{number}" for number in range(1000)]


@pytest.mark.parametrize("name", BALANCES)
@given(key=st.text(), load=LOADS, count=st.integers(0, 5))
def test_an_order_has_every_instance_once(
    name: BalanceName, key: str, load: dict[Instance, int], count: int
) -> None:
    some = INSTANCES[:count]
    assert Counter(BALANCES[name]().order(some, key, load)) == Counter(some)


def test_turns_go_on_from_item_to_item() -> None:
    policy = RoundRobin()
    firsts = [policy.order(INSTANCES[:3], "same", {})[0].url for _ in range(7)]

    assert firsts == [INSTANCES[number % 3].url for number in range(7)]


def test_the_least_loaded_is_first_and_equals_take_turns() -> None:
    policy = LeastLoad()
    load = {INSTANCES[0]: 2, INSTANCES[1]: 1, INSTANCES[2]: 1}
    firsts = {policy.order(INSTANCES[:3], "same", load)[0] for _ in range(4)}

    assert firsts == {INSTANCES[1], INSTANCES[2]}


def test_keys_are_spread_and_stay_when_an_instance_goes() -> None:
    policy = Affinity()
    before = {key: policy.order(INSTANCES, key, {})[0] for key in KEYS}
    after = {key: policy.order(INSTANCES[:-1], key, {})[0] for key in KEYS}

    assert min(Counter(before.values()).values()) > 100
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if before[key] == INSTANCES[-1]}
    assert before == {key: Affinity().order(INSTANCES[::-1], key, {})[0] for key in KEYS}


@given(load=LOADS, key=st.text())
def test_an_instance_with_much_more_to_do_than_the_mean_is_not_first(
    load: dict[Instance, int], key: str
) -> None:
    first = Affinity().order(INSTANCES, key, load)[0]
    mean = (sum(load.values()) + 1) / len(INSTANCES)

    assert load.get(first, 0) < LOAD_FACTOR * mean + 1
