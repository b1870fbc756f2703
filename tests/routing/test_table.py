"""Instances that are eligible for the next request."""

import pytest

from epd.errors import NoInstance, UpstreamBusy, UpstreamFailed, UpstreamUnreachable
from epd.routing.balance import Choice
from epd.routing.health import HealthState
from epd.routing.instances import Instance, Role
from epd.routing.table import InstanceTable
from tests.support.clock import table_of

A, B, C, D = (Instance(Role.DECODE, f"http://{name}") for name in "abcd")


def usable(table: InstanceTable) -> list[Instance]:
    return [one.instance for one in table.usable_candidates(Role.DECODE)]


def fails(table: InstanceTable, instance: Instance, error: Exception, times: int = 5) -> None:
    for _ in range(times):
        with pytest.raises(type(error)), table.track_request(instance):
            raise error


def test_an_empty_table_has_no_choice() -> None:
    with pytest.raises(NoInstance):
        Choice(InstanceTable(), Role.DECODE).best_instance()


def test_a_tried_instance_is_chosen_again_only_if_all_were_tried() -> None:
    choice = Choice(InstanceTable([A, B]), Role.DECODE)

    assert {choice.best_instance(tried=[A]) for _ in range(4)} == {B}
    assert choice.has_untried([A])
    assert not choice.has_untried([A, B])
    assert choice.best_instance(tried=[A, B]) in {A, B}


@pytest.mark.fault(5, 34)
def test_a_down_instance_is_tried_before_a_request_fails() -> None:
    table, _ = table_of(A, B)
    fails(table, A, UpstreamUnreachable("x"))
    choice = Choice(table, Role.DECODE)

    assert [choice.best_instance() for _ in range(3)] == [B] * 3
    assert choice.has_untried([B])
    assert choice.best_instance(tried=[B]) == A
    assert not choice.has_untried([A, B])


def test_a_failing_instance_is_not_usable() -> None:
    table, _ = table_of(A, B)
    fails(table, A, UpstreamFailed("x"))

    assert usable(table) == [B]


def test_all_instances_are_used_if_more_than_half_fail() -> None:
    table, _ = table_of(A, B, C)
    fails(table, A, UpstreamFailed("x"))
    assert usable(table) == [B, C]

    fails(table, B, UpstreamFailed("x"))
    assert usable(table) == [A, B, C]


def test_unreachable_instances_are_not_usable_even_if_they_are_most() -> None:
    table, _ = table_of(A, B, C, D)
    for instance in (A, B, C):
        fails(table, instance, UpstreamUnreachable("x"))

    assert usable(table) == [D]
    assert table.any_serving(Role.DECODE)


@pytest.mark.fault(13)
def test_all_instances_are_tried_if_none_is_reachable() -> None:
    table, _ = table_of(A, B)
    for instance in (A, B):
        fails(table, instance, UpstreamUnreachable("x"))

    assert usable(table) == [A, B]
    assert not table.any_serving(Role.DECODE)


def test_a_busy_instance_is_not_usable_unless_all_are_busy() -> None:
    table, clock = table_of(A, B)
    fails(table, A, UpstreamBusy("x", retry_after_s=10.0), times=1)
    assert usable(table) == [B]

    fails(table, B, UpstreamBusy("x", retry_after_s=2.0), times=1)
    assert usable(table) == [A, B]
    clock.now_s = 5.0
    assert usable(table) == [B]


def test_an_internal_error_does_not_eject_an_instance() -> None:
    table, _ = table_of(A, B)
    fails(table, A, ValueError("ours"), times=10)

    assert table.state(A) is HealthState.HEALTHY
    assert table.under_way == {}


@pytest.mark.fault(64)
def test_a_refused_connection_takes_an_instance_down_unless_it_may_be_starting() -> None:
    table, _ = table_of(A)
    table.record_refusal(A)
    assert table.state(A) is HealthState.HEALTHY
    table.record_probe(A, well=True)
    table.record_refusal(A)

    assert (table.state(A), table.cause(A)) == (HealthState.DOWN, "connection refused")
    table.record_refusal(B)  # removed meanwhile


def test_an_instance_of_the_table_is_not_added_twice() -> None:
    table, _ = table_of(A)
    table.add(A)

    assert table.of_roles(Role.DECODE) == (A,)
