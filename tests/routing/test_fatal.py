"""Ledger of instance deaths by the requests and items that the instances had."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import ProxyError, SuspectedFatal, UpstreamDied
from epd.routing.fatal import (
    ANSWERS_PER_DEATH,
    MAX_SUSPECTS,
    MAX_TENANT_DEATHS,
    SAME_DEATH_S,
    FatalRequests,
    Watched,
    fingerprint,
)
from epd.routing.instances import Instance, Role

ONE, OTHER, THIRD = (Instance(Role.DECODE, f"http://d{number}:1") for number in range(3))
REJECT_S = 300.0


@dataclass
class Deaths:
    """The ledger, with a clock that the test sets."""

    now_s: float = 0.0
    draining: set[Instance] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ledger = FatalRequests(REJECT_S, self.draining.__contains__, lambda: self.now_s)

    def die(self, instance: Instance, *items: str, body: str = "b", tenant: str = "t") -> bool:
        """Record a death; return whether the request is rejected from now on."""
        error = UpstreamDied("it broke", slug="decode_failed", stage="decode")
        return isinstance(self.end(error, instance, Watched(tenant, body), items), SuspectedFatal)

    def end(
        self, error: ProxyError, instance: Instance, watched: Watched, items: Sequence[str] = ()
    ) -> ProxyError:
        """Count a death; return the error of the request."""
        return self.ledger.count_death(error, instance, watched, items)

    def rejected(self, *items: str, body: str = "b", tenant: str = "t") -> bool:
        try:
            self.ledger.check(Watched(tenant, body), items)
        except SuspectedFatal:
            return True
        return False


def test_a_fatal_item_is_rejected_in_any_request() -> None:
    deaths = Deaths()
    deaths.die(ONE, "cat", body="first")
    deaths.die(OTHER, "cat", body="second")

    assert deaths.rejected("cat", body="third")
    assert not deaths.rejected("dog", body="third")
    assert not deaths.rejected(body="first")


@pytest.mark.parametrize(
    ("later_s", "rejected"), [(SAME_DEATH_S, False), (SAME_DEATH_S + 0.001, True)]
)
def test_an_instance_dies_again_once_it_can_be_up_again(later_s: float, rejected: bool) -> None:
    deaths = Deaths()
    deaths.die(ONE)
    deaths.now_s += later_s

    assert deaths.die(ONE) is rejected


@pytest.mark.parametrize(("later_s", "rejected"), [(REJECT_S - 0.001, True), (REJECT_S, False)])
def test_a_rejection_ends_in_time(later_s: float, rejected: bool) -> None:
    deaths = Deaths()
    deaths.die(ONE)
    deaths.die(OTHER)
    deaths.now_s += later_s

    assert deaths.rejected() is rejected


def test_deaths_that_lie_far_apart_do_not_add_up() -> None:
    deaths = Deaths()
    deaths.die(ONE)
    deaths.now_s += REJECT_S

    assert not deaths.die(OTHER)


def test_items_processed_without_harm_are_forgotten() -> None:
    deaths = Deaths()
    deaths.die(ONE, "cat")
    deaths.ledger.record_survival(Watched("t", "b"), ["cat"], body=False)

    assert not deaths.die(OTHER, "cat", body="another")  # the item has one death
    assert deaths.die(THIRD)  # the body has two


def test_a_fatal_request_is_suspected_even_if_its_deaths_lie_far_apart() -> None:
    """The ledger forgets the first death, but the request itself does not get a third instance."""
    deaths, watched = Deaths(), Watched("t", "b")
    error = UpstreamDied("it broke", slug="encode_failed", stage="encode")

    assert deaths.end(error, ONE, watched) is error
    deaths.now_s += REJECT_S + 1
    assert isinstance(deaths.end(error, OTHER, watched), SuspectedFatal)
    assert not deaths.rejected()


def test_the_deaths_of_a_request_are_counted_over_its_stages() -> None:
    deaths, watched = Deaths(), Watched("t", "b")
    error = UpstreamDied("it broke", slug="encode_failed", stage="encode")
    deaths.end(error, ONE, watched, ["cat"])
    deaths.end(error, ONE, watched, ["dog"])  # the same death
    assert not watched.is_spent
    deaths.end(error, OTHER, watched, ["dog"])

    assert watched.is_spent
    assert not deaths.rejected("cat", body="other")
    assert deaths.rejected("dog", body="other")


def test_the_number_of_suspects_is_bounded_and_the_oldest_is_forgotten() -> None:
    deaths = Deaths()
    for number in range(MAX_SUSPECTS):
        deaths.die(ONE, body=str(number))
    assert len(deaths.ledger) == MAX_SUSPECTS
    deaths.die(ONE, body="one more")

    assert len(deaths.ledger) == MAX_SUSPECTS
    assert not deaths.die(OTHER, body="0")
    assert deaths.die(OTHER, body=str(MAX_SUSPECTS - 1))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([ONE, OTHER, THIRD]),
            st.sampled_from(["a", "b"]),
            st.sampled_from(["t", "u"]),
            st.floats(0, 2 * SAME_DEATH_S),
        ),
        max_size=12,
    )
)
def test_a_request_is_rejected_exactly_after_two_separate_deaths(
    events: list[tuple[Instance, str, str, float]],
) -> None:
    deaths, last, count = Deaths(), dict[object, float](), dict[tuple[str, str], int]()
    for instance, body, tenant, later_s in events:
        deaths.now_s += later_s
        apart = deaths.now_s - last.get((instance, body, tenant), -1e9) > SAME_DEATH_S
        count[body, tenant] = count.get((body, tenant), 0) + apart
        last[instance, body, tenant] = deaths.now_s

        deaths.die(instance, body=body, tenant=tenant)
        assert deaths.rejected(body=body, tenant=tenant) == (count[body, tenant] >= 2)
    for (body, tenant), times in count.items():
        assert deaths.rejected(body=body, tenant=tenant) == (times >= 2)


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_fingerprints_differ_between_bodies(one: bytes, other: bytes) -> None:
    assert (fingerprint(one, 7) == fingerprint(other, 7)) == (one == other)
    assert fingerprint(one, 7) == fingerprint(bytearray(one), 7)
    assert fingerprint(one, 7) != fingerprint(one, 8)


def test_a_large_bodys_fingerprint_is_of_all_its_bytes() -> None:
    body = bytes(3_000_000)
    changed = [body[:at] + b"x" + body[at + 1 :] for at in (0, 1_234_567, 2_999_999)]

    assert len({fingerprint(one, 7) for one in [body, body + b"\0", *changed]}) == 5


POISON, OTHER_KIND = 1, 2


def in_quarantine(deaths: Deaths, kind: int = POISON, tenant: str = "t") -> bool:
    return deaths.ledger.is_quarantined(Watched(tenant, "new", kind=kind))


def dies_varied(deaths: Deaths, times: int, every_s: float = 20.0) -> None:
    """Let instances die of different bodies of one kind."""
    for number in range(times):
        deaths.now_s += every_s
        watched = Watched("t", f"body {number}", kind=POISON)
        deaths.end(UpstreamDied("it broke", stage="decode"), ONE, watched)


def survives(deaths: Deaths, kind: int, times: int = 1) -> None:
    for _ in range(times):
        deaths.ledger.record_survival(Watched("t", "b", kind=kind))


def test_the_third_death_of_a_tenant_puts_its_requests_in_quarantine() -> None:
    deaths = Deaths()
    dies_varied(deaths, MAX_TENANT_DEATHS - 1)
    assert not in_quarantine(deaths)
    dies_varied(deaths, 1)

    assert in_quarantine(deaths)
    assert in_quarantine(deaths, OTHER_KIND)
    assert not in_quarantine(deaths, tenant="u")


def test_the_request_of_the_third_death_has_no_second_try() -> None:
    deaths, watched = Deaths(), Watched("t", "b", kind=POISON)
    dies_varied(deaths, MAX_TENANT_DEATHS - 1)
    error = UpstreamDied("it broke", stage="decode")

    assert isinstance(deaths.end(error, OTHER, watched), SuspectedFatal)
    assert watched.is_spent


def test_kinds_that_are_answered_far_more_often_than_they_are_fatal_are_exempt() -> None:
    deaths = Deaths()
    dies_varied(deaths, MAX_TENANT_DEATHS)
    survives(deaths, OTHER_KIND)
    survives(deaths, POISON, ANSWERS_PER_DEATH * MAX_TENANT_DEATHS)
    assert not in_quarantine(deaths, OTHER_KIND)
    assert in_quarantine(deaths)

    survives(deaths, POISON)
    assert not in_quarantine(deaths)
    dies_varied(deaths, 1)
    assert in_quarantine(deaths)


def test_requests_of_kinds_that_were_answered_before_go_on_after_crashes_of_other_causes() -> None:
    deaths = Deaths()
    survives(deaths, OTHER_KIND, 3)
    dies_varied(deaths, MAX_TENANT_DEATHS)

    assert not in_quarantine(deaths, OTHER_KIND)


def test_a_long_history_of_answers_outweighs_no_more_than_three_deaths() -> None:
    deaths = Deaths()
    survives(deaths, POISON, 10_000)
    dies_varied(deaths, MAX_TENANT_DEATHS - 1)
    assert not in_quarantine(deaths)
    dies_varied(deaths, 1)

    assert in_quarantine(deaths)


def test_a_host_that_ends_all_its_instances_puts_no_proven_kind_in_quarantine() -> None:
    deaths = Deaths()
    survives(deaths, POISON, 1000)
    for number in range(8):
        watched = Watched("t", f"body {number}", kind=POISON)
        instance = Instance(Role.DECODE, f"http://d{number}:1")
        deaths.end(UpstreamDied("it broke", stage="decode"), instance, watched)
        assert not watched.is_spent

    assert not in_quarantine(deaths)


def test_a_later_quarantine_chooses_its_instances_anew() -> None:
    deaths = Deaths()
    dies_varied(deaths, MAX_TENANT_DEATHS)
    first = Watched("t", "b", kind=POISON)
    assert deaths.ledger.restrict(first)
    assert first.choose_instance("decode", lambda _: ONE) is ONE
    assert first.pins == {"decode": ONE.url}
    deaths.now_s += REJECT_S - 1  # the first quarantine has ended, and its last death is recent
    dies_varied(deaths, MAX_TENANT_DEATHS)

    second = Watched("t", "c", kind=POISON)
    assert deaths.ledger.restrict(second)
    assert second.pins == {}


def test_a_quarantine_ends_when_three_deaths_are_no_longer_recent() -> None:
    deaths = Deaths()
    dies_varied(deaths, MAX_TENANT_DEATHS)
    deaths.now_s += REJECT_S - 20 * (MAX_TENANT_DEATHS - 1)

    assert not in_quarantine(deaths)


def test_deaths_that_are_far_apart_cause_no_quarantine() -> None:
    deaths = Deaths()
    dies_varied(deaths, 10, every_s=REJECT_S / 2)

    assert not in_quarantine(deaths)
