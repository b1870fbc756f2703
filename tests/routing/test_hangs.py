"""Instances that make no progress: which ones are ejected, and which only have long requests."""

from collections.abc import Callable

import pytest

from epd.errors import UpstreamRejected, UpstreamTimeout
from epd.routing.health import HANG_AFTER, HANG_S, HealthState
from epd.routing.instances import Instance, Role
from epd.routing.reports import Report
from epd.routing.table import InFlight, InstanceTable

A, B = (Instance(Role.DECODE, f"http://d{number}:1") for number in range(2))
LATE = UpstreamTimeout("late", slug="decode_timeout", stage="decode")


class Clocked:
    """Table of two decode instances, with a clock that the test sets, and its changes."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.changes: list[tuple[Instance, str, str]] = []
        self.table = InstanceTable(
            (A, B), on_change=lambda *change: self.changes.append(change), clock=lambda: self.now_s
        )

    def begin(self, instance: Instance = A) -> InFlight:
        return self.table.track_request(instance).begin_request()

    def times_out(self, instance: Instance = A, *, others: bool = True) -> None:
        """Send a request that times out, while the other instance answers, or does not."""
        request = self.begin(instance)
        self.now_s += 10
        if others:
            self.begin(B).end_request()
        request.end_request(LATE)

    def report(self, instance: Instance = A, running: int = 1, progress: int | None = 7) -> None:
        self.table.record_report(instance, Report(0, running, {0: running}, 0, progress), 1.0)

    @property
    def ejected(self) -> bool:
        return self.table.state(A) is HealthState.EJECTED


@pytest.fixture
def fleet() -> Clocked:
    return Clocked()


@pytest.mark.fault(77)
def test_timeouts_in_a_row_eject_while_another_instance_answers(fleet: Clocked) -> None:
    for _ in range(HANG_AFTER - 1):
        fleet.times_out()
        assert not fleet.ejected
    fleet.times_out()

    assert fleet.changes == [(A, HealthState.EJECTED, "timeouts without progress")]


def test_timeouts_of_concurrent_requests_count_each(fleet: Clocked) -> None:
    waiting = [fleet.begin() for _ in range(HANG_AFTER)]
    fleet.now_s += 10
    fleet.begin(B).end_request()
    for request in waiting:
        request.end_request(LATE)

    assert fleet.ejected


@pytest.mark.fault(77)
def test_timeouts_do_not_eject_while_no_other_instance_answers(fleet: Clocked) -> None:
    for _ in range(10):
        fleet.times_out(others=False)

    assert fleet.changes == []


@pytest.mark.parametrize("begins", [True, False])
def test_an_answer_between_timeouts_shows_progress(fleet: Clocked, *, begins: bool) -> None:
    """The request waits for a long time in a queue from which others are served."""
    for _ in range(10):
        request = fleet.begin()
        fleet.now_s += 10
        served = fleet.begin()
        if begins:
            served.record_answer()
        fleet.begin(B).end_request()
        served.end_request(LATE if begins else None)
        request.end_request(LATE)

    assert fleet.changes == []


def test_a_client_error_is_no_progress_of_the_engine(fleet: Clocked) -> None:
    """The API server answers it, also while the engine hangs."""
    for _ in range(HANG_AFTER):
        fleet.times_out()
        refused = UpstreamRejected(400, b"", stage="decode", headers={})
        fleet.begin().end_request(refused)

    assert fleet.ejected


@pytest.mark.fault(71)
def test_a_long_queue_with_token_progress_does_not_eject(fleet: Clocked) -> None:
    for number in range(10):
        request = fleet.begin()
        fleet.now_s += 300
        fleet.report(progress=number)
        fleet.begin(B).end_request()
        request.end_request(LATE)

    assert fleet.changes == []


@pytest.mark.fault(71)
def test_open_answers_count_as_progress_without_reports(fleet: Clocked) -> None:
    streaming = fleet.begin()
    streaming.record_answer()
    for _ in range(10):
        fleet.times_out()
    assert fleet.changes == []

    streaming.end_request(LATE)  # it has stalled too
    for _ in range(HANG_AFTER):
        fleet.times_out()
    assert fleet.ejected


def test_a_hanging_instance_returns_on_trial_and_one_timeout_ejects_it_again(
    fleet: Clocked,
) -> None:
    for _ in range(HANG_AFTER):
        fleet.times_out()
    fleet.now_s += 30
    assert fleet.table.state(A) is HealthState.TRIAL
    fleet.times_out()

    assert fleet.ejected


def seconds_until_ejection(fleet: Clocked, report: Callable[[int], None]) -> int | None:
    """Report each second while a request waits; return the seconds until the ejection."""
    waiting = fleet.begin()
    for second in range(2 * int(HANG_S)):
        report(second)
        fleet.begin(B).end_request()
        if fleet.ejected:
            return second
        fleet.now_s += 1
    waiting.end_request(LATE)
    return None


@pytest.mark.fault(77)
def test_no_progress_of_running_requests_ejects(fleet: Clocked) -> None:
    assert seconds_until_ejection(fleet, lambda _: fleet.report()) == HANG_S

    assert fleet.changes == [(A, HealthState.EJECTED, "no progress for 30 s")]


def test_an_instance_stays_ejected_while_its_requests_make_no_progress(fleet: Clocked) -> None:
    seconds_until_ejection(fleet, lambda _: fleet.report())
    for _ in range(100):
        fleet.now_s += 1
        fleet.report()
        assert fleet.ejected

    fleet.now_s += 10
    fleet.report(progress=8)
    assert fleet.table.state(A) is HealthState.TRIAL


@pytest.mark.fault(71)
@pytest.mark.parametrize(
    "report",
    [
        lambda fleet, second: fleet.report(progress=second // 20),  # a step takes 20 s
        lambda fleet, _: fleet.report(running=0),  # waiting for KV blocks
        lambda fleet, _: fleet.report(progress=None),  # reports without counters
        lambda fleet, _: fleet.table.record_report(A, None, 1.0),
    ],
)
def test_progress_or_no_running_request_does_not_eject(
    fleet: Clocked, report: Callable[[Clocked, int], None]
) -> None:
    assert seconds_until_ejection(fleet, lambda second: report(fleet, second)) is None


def test_an_idle_instance_is_not_ejected_by_a_stale_gauge(fleet: Clocked) -> None:
    for _ in range(100):
        fleet.report()
        fleet.begin(B).end_request()
        fleet.now_s += 1
    request = fleet.begin()
    fleet.report()
    request.end_request()

    assert fleet.changes == []


def test_no_progress_does_not_eject_while_no_other_instance_makes_any(fleet: Clocked) -> None:
    waiting = fleet.begin()
    for _ in range(100):
        fleet.report()
        fleet.report(B)
        fleet.now_s += 1
    waiting.end_request(LATE)

    assert fleet.changes == []
