"""The balance `content` in a simulated fleet: what engines compute, and how they are loaded."""

import math
from functools import cache
from typing import Any

import pytest

from epd.routing.rendezvous import FEW_REQUESTS, LOAD_FACTOR
from tests.support.prefix_fleet import Asked, Fleet, groups, popular

GAP_S = 2.0
"""Time between two requests of a group. A cache keeps a prompt for some 17 s."""


@pytest.fixture(scope="module")
def requests() -> list[Asked]:
    return groups(GAP_S)


@pytest.fixture(scope="module")
def least_load(requests: list[Asked]) -> Fleet:
    return Fleet("least_load").run(requests)


def test_content_computes_half_of_the_tokens_of_least_load(
    requests: list[Asked], least_load: Fleet
) -> None:
    content = Fleet("content").run(requests)
    session = Fleet("session").run(requests)
    true = Fleet("content", true_caches=True).run(requests)

    assert content.computed <= 0.5 * least_load.computed
    assert content.computed <= session.computed
    assert content.computed == pytest.approx(true.computed, rel=0.1)
    assert content.p90_s < 0.1 * least_load.p90_s


@pytest.mark.parametrize(
    ("settings", "most"), [({"reports_size": False}, 0.5), ({"proxies": 4}, 0.6)]
)
def test_proxies_that_know_less_still_compute_less(
    requests: list[Asked], least_load: Fleet, settings: dict[str, Any], most: float
) -> None:
    assert Fleet("content", **settings).run(requests).computed <= most * least_load.computed


def test_proxies_agree_on_the_home_of_a_new_prefix() -> None:
    fleet = Fleet("content", proxies=4)
    apart = [one._replace(at_s=10.0 * number) for number, one in enumerate(groups(GAP_S)[:400])]
    fleet.run(apart)

    assert fleet.computed == Fleet("content").run(apart).computed


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_a_popular_picture_loads_no_instance_above_the_bound(share: float) -> None:
    fleet = Fleet("content").run(popular(share, 1500))

    for chosen, loads in fleet.loads:
        assert chosen <= max(math.ceil(LOAD_FACTOR * sum(loads) / len(loads)), FEW_REQUESTS)
    assert max(chosen for chosen, _ in fleet.loads) > 2 * FEW_REQUESTS


def test_a_restart_that_no_proxy_notices_costs_little(
    requests: list[Asked], least_load: Fleet
) -> None:
    fleet = Fleet("content")
    for engine in fleet.engines.values():
        fleet.run_at(40.0, engine.restart)

    assert fleet.run(requests).computed <= 0.5 * least_load.computed


def test_a_restarted_instance_is_sent_its_prefixes_again(
    requests: list[Asked], least_load: Fleet
) -> None:
    fleet = Fleet("content")
    [table], (first, *_) = fleet.tables, fleet.engines

    def leave() -> None:
        fleet.engines[first].restart()
        table.remove(first)

    fleet.run_at(20.0, leave)
    fleet.run_at(30.0, lambda: table.add(first))
    fleet.run(requests)

    before, after = (sum(len(loads) == size for _, loads in fleet.loads) for size in (4, 3))
    assert min(before, after) > 300
    assert fleet.computed <= 0.6 * least_load.computed
    assert table.load(first).prompts.tokens > 0


@cache
def true_fleet(proxies: int = 1, scale: float = 1.0) -> int:
    """Return what a fleet computes if proxies see the engines' own caches."""
    fleet = Fleet("content", blocks=scale, true_caches=True, proxies=proxies)
    return fleet.run(groups(GAP_S)).computed


@pytest.mark.parametrize("scale", [0.6, 1.0, 1.3])
def test_events_are_worth_the_engines_own_caches(requests: list[Asked], scale: float) -> None:
    """Whether the proxy's estimates of tokens are too high, right or too low."""
    precise = Fleet("content", blocks=scale, events=True).run(requests)

    assert precise.computed == pytest.approx(true_fleet(scale=scale), rel=0.03)


def test_events_inform_each_proxy_of_the_others_requests(requests: list[Asked]) -> None:
    precise = Fleet("content", blocks=1.0, events=True, proxies=4).run(requests)
    estimated = Fleet("content", blocks=1.0, proxies=4).run(requests)

    assert precise.computed == pytest.approx(true_fleet(proxies=4), rel=0.03)
    assert precise.computed < 0.97 * estimated.computed


def test_proxies_that_miss_events_estimate_until_they_see_some_again(
    requests: list[Asked],
) -> None:
    fleet = Fleet("content", blocks=1.0, events=True)
    [table], precise = fleet.tables, list[bool]()

    def listen(*, listens: bool) -> None:
        for one in fleet.followers:
            one.listens = listens
            one.lose_events()

    def look() -> None:
        precise.append(all(table.load(one).precise for one in fleet.engines))

    for at_s in (19.0, 29.0, 60.0):
        fleet.run_at(at_s, look)
    fleet.run_at(20.0, lambda: listen(listens=False))
    fleet.run_at(40.0, lambda: listen(listens=True))
    fleet.run(requests)

    assert precise == [True, False, True]
    assert fleet.computed == pytest.approx(true_fleet(), rel=0.1)


def test_engines_that_restart_are_known_again_by_their_events(requests: list[Asked]) -> None:
    computed = []
    for events in (True, False):
        fleet = Fleet("content", blocks=1.0, events=events, true_caches=not events)

        def restart(fleet: Fleet = fleet) -> None:
            for engine in fleet.engines.values():
                engine.restart()
            for one in fleet.followers:
                one.notice_restart()

        fleet.run_at(40.0, restart)
        computed.append(fleet.run(requests).computed)

    assert computed[0] == pytest.approx(computed[1], rel=0.03)


def test_a_proxy_that_starts_later_learns_the_caches_from_events(
    requests: list[Asked],
) -> None:
    fleet = Fleet("content", blocks=1.0, events=True)

    def listen(*, listens: bool) -> None:
        for one in fleet.followers:
            one.listens = listens

    listen(listens=False)
    fleet.run_at(requests[-1].at_s / 2, lambda: listen(listens=True))
    fleet.run(requests)

    assert fleet.computed == pytest.approx(true_fleet(), rel=0.05)
