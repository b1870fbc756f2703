"""Choice of the instance for a request."""

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import UpstreamUnreachable
from epd.routing import ItemBalanceName
from epd.routing.balance import (
    BALANCES,
    Choice,
    LeastLoad,
    PowerOfTwo,
    Rendezvous,
    RoundRobin,
)
from epd.routing.instances import Instance, Role
from epd.routing.load import Load
from epd.routing.rendezvous import LOAD_FACTOR, OUTLIER, upper_bound
from epd.routing.reports import Report
from epd.routing.table import InstanceTable
from epd.routing.urls import MAX_WEIGHT, MIN_WEIGHT

KEYS = [f"key-{number}" for number in range(4000)]
WEIGHTS = [1.0, 2.0, 5.0]
some_weight = st.sampled_from([0.0, MIN_WEIGHT, 0.5, 1.0, 3.0, MAX_WEIGHT])
some_loads = st.lists(st.tuples(st.integers(0, 50), some_weight), min_size=2, max_size=9)


def loads_of(*had: tuple[int, float]) -> list[Load]:
    loads = [Load(f"http://e{number}:1", weight) for number, (_, weight) in enumerate(had)]
    for load, (requests, _) in zip(loads, had, strict=True):
        for _ in range(requests):
            load.begin_request()
    return loads


def idle(*weights: float) -> list[Load]:
    return loads_of(*((0, weight) for weight in weights))


def drawing(seed: int) -> PowerOfTwo:
    return PowerOfTwo(random.Random(seed))  # noqa: S311 - the same sequence at each run


@pytest.mark.parametrize("name", BALANCES)
@given(had=some_loads, key=st.text())
def test_each_balance_picks_a_candidate(
    name: ItemBalanceName, had: list[tuple[int, float]], key: str
) -> None:
    loads = loads_of(*had)

    assert BALANCES[name]().pick_load(loads, key) in loads


@pytest.mark.parametrize("balance", [RoundRobin(), LeastLoad()])
def test_round_robin_continues_from_request_to_request(balance: RoundRobin | LeastLoad) -> None:
    loads = idle(1, 1, 1)

    assert [loads.index(balance.pick_load(loads)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_turns_by_weight_come_without_bursts() -> None:
    loads, balance = idle(5, 1, 1), RoundRobin()

    assert [loads.index(balance.pick_load(loads)) for _ in range(7)] == [0, 0, 1, 0, 2, 0, 0]


@given(
    weights=st.lists(st.integers(1, 20).map(float), min_size=2, max_size=6),
    rounds=st.integers(1, 3),
)
def test_after_as_many_turns_as_weights_each_has_had_its_own(
    weights: list[float], rounds: int
) -> None:
    loads, balance = idle(*weights), RoundRobin()
    had = Counter(loads.index(balance.pick_load(loads)) for _ in range(rounds * int(sum(weights))))

    assert [had[place] for place in range(len(loads))] == [rounds * weight for weight in weights]


def test_turns_stay_fair_where_instances_come_and_go() -> None:
    balance, loads, had = RoundRobin(), idle(1, 1, 1, 1), Counter[Load]()
    for turn in range(4000):
        had[balance.pick_load(loads[: 2 + turn % 3])] += 1

    assert max(had.values()) < 1600


def test_turns_do_not_remember_all_that_ever_were() -> None:
    balance = RoundRobin(max_owed=8)
    for _ in range(50):
        loads = idle(1, 1, 1)
        assert {balance.pick_load(loads) for _ in range(3)} == set(loads)

    assert len(balance._owed) <= 8 + 3  # noqa: SLF001


@given(had=some_loads)
def test_the_picked_instance_has_the_least_load_for_its_weight(
    had: list[tuple[int, float]],
) -> None:
    loads = loads_of(*had)
    picked = LeastLoad().pick_load(loads)

    assert all(picked.value / picked.share <= load.value / load.share for load in loads)


@pytest.mark.parametrize("balance", [LeastLoad(), drawing(1), RoundRobin()])
def test_requests_are_spread_by_weight(balance: LeastLoad | PowerOfTwo | RoundRobin) -> None:
    busy, resting, had = idle(*WEIGHTS), idle(*WEIGHTS), Counter[int]()
    for _ in range(800):  # all in progress together
        balance.pick_load(busy).begin_request()
    for _ in range(8000):  # one after the other
        had[resting.index(balance.pick_load(resting))] += 1

    for load, weight in zip(busy, WEIGHTS, strict=True):
        assert load.value == pytest.approx(100 * weight, rel=0.06)
    # Two random choices of three favour the least loaded more than its weight.
    if not isinstance(balance, PowerOfTwo):
        assert [had[place] for place in range(3)] == [1000, 2000, 5000]
    assert min(had.values()) > 900


def test_the_less_loaded_of_two_random_instances_is_picked() -> None:
    balance, loads = drawing(2), loads_of((9, 1), (5, 1), (0, 1))
    had = Counter(loads.index(balance.pick_load(loads)) for _ in range(3000))

    assert had[0] == 0  # another instance always has less
    assert had[1] == pytest.approx(1000, rel=0.1)
    assert had[2] == pytest.approx(2000, rel=0.1)


def test_proxies_that_draw_do_not_all_pick_the_same() -> None:
    loads = idle(*[1] * 10)

    assert len({drawing(seed).pick_load(loads) for seed in range(20)}) > 5


def test_keys_are_spread_and_stay_when_an_instance_goes() -> None:
    balance, loads = Rendezvous(), idle(*[1] * 5)
    before = {key: balance.pick_load(loads, key) for key in KEYS}
    after = {key: balance.pick_load(loads[:-1], key) for key in KEYS}

    assert min(Counter(before.values()).values()) > 700
    moved = {key for key in KEYS if before[key] is not after[key]}
    assert moved == {key for key in KEYS if before[key] is loads[-1]}
    assert before == {key: Rendezvous().pick_load(loads[::-1], key) for key in KEYS}


def test_keys_are_spread_by_weight_and_only_those_move_that_have_to() -> None:
    balance, loads = Rendezvous(), idle(*WEIGHTS)
    loads = [*loads, *idle(1, 1, 1, 1)[3:]]
    loads[3].set_weight(2.0)
    before = {key: balance.pick_load(loads, key) for key in KEYS}
    had = Counter(before.values())
    for load in loads:
        assert had[load] == pytest.approx(len(KEYS) * load.share / 10, rel=0.15)

    loads[3].set_weight(4.0)
    after = {key: balance.pick_load(loads, key) for key in KEYS}

    assert all(after[key] in {before[key], loads[3]} for key in KEYS)


@given(had=some_loads, key=st.text(min_size=1))
def test_an_instance_with_much_more_to_do_than_its_share_gets_no_keys(
    had: list[tuple[int, float]], key: str
) -> None:
    loads = loads_of(*had)
    picked = Rendezvous().pick_load(loads, key)
    requests, weights = sum(load.value for load in loads), sum(load.share for load in loads)

    assert picked.value < LOAD_FACTOR * (requests + 1) * picked.share / weights + 1


def report(load: Load, requests: int) -> None:
    load.report_due(0, 1)
    load.record_report(Report(0, load.under_way + requests, {}), 0, 1)


@given(had=some_loads, elsewhere=st.lists(st.integers(0, 10**9)), key=st.text(min_size=1))
def test_affinity_picks_an_instance_for_any_reports(
    had: list[tuple[int, float]], elsewhere: list[int], key: str
) -> None:
    loads = loads_of(*had)
    for load, requests in zip(loads, elsewhere, strict=False):
        report(load, requests)

    assert Rendezvous().pick_load(loads, key) in loads


@given(had=some_loads, huge=st.integers(0, 10**9), key=st.text(min_size=1))
def test_a_report_of_one_instance_does_not_raise_the_bound_of_others(
    had: list[tuple[int, float]], huge: int, key: str
) -> None:
    loads = loads_of(*had)
    *others, odd = loads
    report(odd, huge)
    picked = Rendezvous().pick_load(loads, key)
    weights = sum(load.share for load in loads)
    most = OUTLIER * (max(load.pressure for load in others) + len(loads) / weights) * odd.share
    requests = sum(load.value for load in others) + max(odd.under_way, most)

    assert picked.value < LOAD_FACTOR * (requests + 1) * picked.share / weights + 1


def test_a_huge_report_of_one_does_not_keep_keys_on_a_loaded_instance() -> None:
    loads = loads_of((5, 1), (5, 1), (5, 1), (5, 1))
    home = Rendezvous().pick_load(loads, "key")
    report(next(load for load in loads if load is not home), 100_000)
    for _ in range(20):
        home.begin_request()

    assert Rendezvous().pick_load(loads, "key") is not home


def test_a_load_that_all_instances_report_counts_in_full() -> None:
    loads = loads_of((1, 1), (1, 1), (1, 1))
    for load in loads:
        report(load, 39)
    home = Rendezvous().pick_load(loads, "key")
    for _ in range(10):
        assert Rendezvous().pick_load(loads, "key") is home
        home.begin_request()


def test_rendezvous_has_a_stable_second_choice() -> None:
    balance, loads = Rendezvous(), idle(*[1] * 5)
    home = balance.pick_load(loads, "key")
    for _ in range(50):
        home.begin_request()
    second = balance.pick_load(loads, "key")

    assert second is not home
    assert second is balance.pick_load([load for load in loads if load is not home], "key")


def test_a_request_without_a_key_goes_to_the_least_loaded_instance() -> None:
    loads = loads_of((2, 1), (0, 1), (2, 1))

    assert Rendezvous().pick_load(loads, "") is loads[1]


ONES = [Instance(Role.DECODE, f"http://d{number}:1") for number in range(4)]
OUT = Instance(Role.DECODE, "http://out:1", weight=0.0)


def test_requests_of_a_session_go_to_one_instance_and_others_to_any() -> None:
    choice = Choice(InstanceTable(ONES), Role.DECODE)

    best = partial(choice.best_instance, balance="session")
    assert {best(session="s") for _ in range(9)} == {best(item="x", session="s")}
    assert len({best(session=f"{number}") for number in range(50)}) == len(ONES)
    assert {best(item="x") for _ in range(9)} == set(ONES)


@pytest.mark.parametrize("name", BALANCES)
def test_weight_0_gets_requests_only_if_no_other_instance_can(name: ItemBalanceName) -> None:
    table = InstanceTable([OUT, *ONES[:2]])
    choice = Choice(table, Role.DECODE)
    best = partial(choice.best_instance, balance=name)
    assert {best(item=key, session=key) for key in KEYS[:40]} == set(ONES[:2])

    for one in ONES[:2]:
        for _ in range(5):
            with pytest.raises(UpstreamUnreachable), table.track_request(one):
                raise UpstreamUnreachable("x")

    assert {best(item=key, session=key) for key in KEYS[:40]} == {OUT}


def test_an_instance_of_weight_zero_is_chosen_after_the_others_were_tried() -> None:
    choice = Choice(InstanceTable([OUT, ONES[0]]), Role.DECODE)

    assert choice.has_untried([ONES[0]])
    assert choice.best_instance([ONES[0]]) == OUT


def test_all_instances_share_requests_if_all_weights_are_zero() -> None:
    outs = [OUT, Instance(Role.DECODE, "http://out2:1", weight=0.0)]
    choice = Choice(InstanceTable(outs), Role.DECODE)

    assert {choice.best_instance() for _ in range(4)} == set(outs)


def test_the_preferred_instance_is_chosen_unless_overloaded_or_tried() -> None:
    table = InstanceTable([*ONES, OUT])
    choice = Choice(table, Role.DECODE)
    home = ONES[1]

    assert {choice.best_instance(prefer=home.url) for _ in range(9)} == {home}
    assert choice.best_instance([home], prefer=home.url) != home
    assert choice.best_instance(prefer=OUT.url) != OUT
    assert choice.best_instance(prefer="http://gone:1") in ONES
    with table.track_request(home):
        assert choice.best_instance(prefer=home.url) == home
        with table.track_request(home):
            assert choice.best_instance(prefer=home.url) != home


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=2, max_size=8),
    st.sampled_from(["affinity", "least_load", "round_robin", "power_of_two"]),
)
def test_the_worthiest_instance_below_the_load_bound_is_chosen(
    instances: list[tuple[int, int]], balance: ItemBalanceName
) -> None:
    table = InstanceTable()
    worth: dict[Instance, int] = {}
    for number, (requests, value) in enumerate(instances):
        instance = Instance(Role.ENCODE, f"http://e{number}:1")
        table.add(instance)
        worth[instance] = value
        load = table.find_load(instance)
        assert load is not None
        for _ in range(requests):
            load.begin_request()
    most = upper_bound([candidate.load for candidate in table.all(Role.ENCODE)])
    room = [each for each in table.all(Role.ENCODE) if each.load.value < most(each.load)]

    choice = Choice(table, Role.ENCODE)
    chosen = choice.best_instance(balance=balance, item="key", worth=lambda each: worth[each])

    best = max(worth[each.instance] for each in room)
    assert worth[chosen] == best or best == 0
    assert best == 0 or chosen in {each.instance for each in room}


def test_instances_of_one_worth_are_chosen_by_their_balance() -> None:
    table = InstanceTable()
    instances = [Instance(Role.ENCODE, f"http://e{number}:1") for number in range(4)]
    for instance in instances:
        table.add(instance)
    choice = Choice(table, Role.ENCODE)
    chosen = Counter(
        choice.best_instance(balance="round_robin", worth=lambda each: float(each in instances[2:]))
        for _ in range(8)
    )

    assert chosen == {instances[2]: 4, instances[3]: 4}
