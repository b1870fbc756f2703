"""Health of an instance: when it is ejected, and when it returns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd.errors import (
    BadRequest,
    Outcome,
    Overloaded,
    ProxyError,
    UpstreamBusy,
    UpstreamDenied,
    UpstreamFailed,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from epd.routing.health import DOWN_AFTER, Health, HealthPolicy, HealthState

POLICY = HealthPolicy()


class Watched:
    """Health with a clock that the test sets, and its state changes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.became: list[HealthState] = []
        self.random = 0.5
        """Jitter of probes; 0.5 means none."""
        self.health = Health(POLICY, 0.0, self.became.append, lambda: self.random)

    def state(self) -> HealthState:
        return self.health.state(self.now_s)

    def ends(self, *outcomes: Outcome) -> None:
        for outcome in outcomes:
            self.health.request_ended(outcome, self.now_s, begun=self.health.request_begun())

    def probe(self, *, well: bool) -> None:
        assert self.health.probe_due(self.now_s)
        self.health.record_probe(self.now_s, well=well)

    def wait_for_probe(self) -> float:
        """Advance the clock until a probe is due; return the seconds."""
        before = self.now_s
        while not self.health.probe_due(self.now_s):
            self.now_s += 0.125
        return self.now_s - before


@pytest.fixture
def one() -> Watched:
    return Watched()


def test_five_failures_in_a_row_eject(one: Watched) -> None:
    one.ends(*[Outcome.BAD] * 4, Outcome.GOOD, *[Outcome.BAD] * 4)
    assert one.state() is HealthState.HEALTHY

    one.ends(Outcome.BAD)
    assert one.state() is HealthState.EJECTED
    assert not one.health.is_eligible(one.now_s)


def test_failures_that_never_come_in_a_row_eject_too(one: Watched) -> None:
    """Answers to invalid requests count as successes."""
    for _ in range(4):
        assert one.state() is HealthState.HEALTHY
        one.ends(*[Outcome.BAD] * 4, Outcome.GOOD)
    one.ends(Outcome.BAD)

    assert one.state() is HealthState.EJECTED


def test_half_of_all_requests_may_fail(one: Watched) -> None:
    for _ in range(100):
        one.ends(Outcome.BAD, Outcome.BAD, Outcome.GOOD, Outcome.GOOD)

    assert one.state() is HealthState.HEALTHY


def test_failures_before_an_ejection_do_not_count_after_it(one: Watched) -> None:
    one.ends(*[Outcome.BAD] * 5)
    one.now_s += 60
    one.ends(Outcome.GOOD, *[Outcome.BAD] * 4, Outcome.GOOD, *[Outcome.BAD] * 4, Outcome.GOOD)

    assert one.state() is HealthState.HEALTHY


def test_an_ejected_instance_returns_on_trial_with_one_request_at_a_time(one: Watched) -> None:
    one.ends(*[Outcome.BAD] * 5)
    one.now_s = 29.9
    assert one.state() is HealthState.EJECTED

    one.now_s = 30.0
    assert one.state() is HealthState.TRIAL
    assert one.health.is_eligible(one.now_s)
    one.health.request_begun()
    assert not one.health.is_eligible(one.now_s)
    one.health.record_answer(one.now_s)
    assert one.state() is HealthState.HEALTHY
    assert one.became == [HealthState.EJECTED, HealthState.TRIAL, HealthState.HEALTHY]


def test_a_trial_that_was_cancelled_is_followed_by_another(one: Watched) -> None:
    one.ends(*[Outcome.BAD] * 5)
    one.now_s = 30.0
    one.ends(Outcome.NOTHING)

    assert one.state() is HealthState.TRIAL
    assert one.health.is_eligible(one.now_s)


@pytest.mark.fault(14)
def test_failures_before_an_outage_do_not_count_after_it(one: Watched) -> None:
    one.probe(well=True)
    old = [one.health.request_begun() for _ in range(9)]
    one.ends(*[Outcome.UNREACHABLE] * 5)
    one.wait_for_probe()
    one.health.record_probe(one.now_s, well=True)
    assert one.state() is HealthState.TRIAL

    trial = one.health.request_begun()
    for begun in old:
        one.health.request_ended(Outcome.BAD, one.now_s, begun=begun)
    assert one.state() is HealthState.TRIAL
    # The trial is still in progress, and allows no second one.
    assert not one.health.is_eligible(one.now_s)
    one.health.request_ended(Outcome.GOOD, one.now_s, begun=trial)
    assert one.state() is HealthState.HEALTHY


def test_a_retry_after_is_bounded(one: Watched) -> None:
    one.health.request_ended(Outcome.BUSY, 0.0, begun=one.health.request_begun(), rest_s=999_999)

    assert one.health.is_busy(299.0)
    assert not one.health.is_busy(300.0)


def test_each_ejection_is_longer_up_to_a_limit(one: Watched) -> None:
    lengths = []
    one.ends(*[Outcome.BAD] * 5)
    for _ in range(12):
        began = one.now_s
        while one.state() is HealthState.EJECTED:
            one.now_s += 1
        lengths.append(one.now_s - began)
        one.ends(Outcome.BAD)  # one failure on trial is enough

    assert lengths == [30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 300, 300]


def test_ejections_are_forgotten_after_a_long_time_of_health(one: Watched) -> None:
    for _ in range(2):
        one.ends(*[Outcome.BAD] * 5)
        one.now_s += 100
        one.ends(Outcome.GOOD)
        assert one.state() is HealthState.HEALTHY
    one.now_s += 300
    one.ends(*[Outcome.BAD] * 5)
    one.now_s += 30

    assert one.state() is HealthState.TRIAL


@pytest.mark.fault(14)
def test_an_unreachable_instance_is_down_until_a_probe_succeeds(one: Watched) -> None:
    one.probe(well=True)
    one.ends(*[Outcome.UNREACHABLE] * 5)
    assert one.state() is HealthState.DOWN
    one.now_s = 1000.0
    assert one.state() is HealthState.DOWN

    one.probe(well=True)
    assert one.state() is HealthState.TRIAL
    one.ends(Outcome.GOOD)
    assert one.state() is HealthState.HEALTHY


@pytest.mark.fault(5)
def test_a_refused_connection_marks_an_instance_down_until_a_probe_succeeds(one: Watched) -> None:
    one.probe(well=True)
    one.ends(Outcome.REFUSED)
    assert one.state() is HealthState.DOWN
    assert one.wait_for_probe() == POLICY.probe_backoff_s
    for _ in range(DOWN_AFTER):
        one.health.record_probe(one.now_s, well=False)
        assert one.health.cause == "connection refused"
        one.wait_for_probe()
    one.health.record_probe(one.now_s, well=True)
    assert one.state() is HealthState.TRIAL
    assert not one.health.cause
    one.ends(Outcome.GOOD)
    assert one.became == [HealthState.DOWN, HealthState.TRIAL, HealthState.HEALTHY]


def test_further_refused_connections_neither_repeat_the_change_nor_advance_the_probe(
    one: Watched,
) -> None:
    one.probe(well=True)
    for _ in range(5):
        one.ends(Outcome.REFUSED)
        one.wait_for_probe()
        one.health.record_probe(one.now_s, well=False)
    one.ends(Outcome.REFUSED)

    assert one.became == [HealthState.DOWN]
    assert one.wait_for_probe() > POLICY.probe_backoff_s


def test_connections_refused_before_an_outage_do_not_count_after_it(one: Watched) -> None:
    """A worker process of the instance may be restarted: what it refused is known."""
    one.probe(well=True)
    late = one.health.request_begun()
    one.ends(Outcome.REFUSED)
    one.wait_for_probe()
    one.health.record_probe(one.now_s, well=True)
    one.ends(Outcome.GOOD)
    one.health.request_ended(Outcome.REFUSED, one.now_s, begun=late)

    assert one.state() is HealthState.HEALTHY


def test_an_instance_that_answers_for_the_first_time_is_healthy_without_a_trial(
    one: Watched,
) -> None:
    for _ in range(3):
        one.wait_for_probe()
        one.health.record_probe(one.now_s, well=False)
    one.wait_for_probe()
    one.health.record_probe(one.now_s, well=True)

    assert one.became == [HealthState.DOWN, HealthState.HEALTHY]


@pytest.mark.parametrize("failure", ["answered before", "ejected before"])
def test_an_instance_that_has_failed_returns_on_trial(one: Watched, failure: str) -> None:
    if failure == "answered before":
        one.probe(well=True)
    else:
        one.ends(*[Outcome.BAD] * 5)
    for _ in range(3):
        one.wait_for_probe()
        one.health.record_probe(one.now_s, well=False)
    assert one.state() is HealthState.DOWN
    one.wait_for_probe()
    one.health.record_probe(one.now_s, well=True)

    assert one.state() is HealthState.TRIAL


@pytest.mark.parametrize(
    ("met", "waits"),
    [
        (True, [5, 5, 5, 1, 2, 4, 8, 16, 30, 30]),
        (False, [0, 5, 5, 1, 2, 4, 5, 5, 5, 5]),  # it may be starting
    ],
)
def test_probes_of_a_down_instance_back_off(one: Watched, *, met: bool, waits: list[float]) -> None:
    if met:
        one.probe(well=True)
    found = []
    for _ in waits:
        found.append(one.wait_for_probe())
        one.health.record_probe(one.now_s, well=False)

    assert found == waits


@pytest.mark.fault(14)
@given(outage=st.integers(3, 12), later=st.integers(0, 6))
def test_probes_that_failed_before_an_answer_do_not_count_after_it(outage: int, later: int) -> None:
    one = Watched()
    for _ in range(outage):
        one.wait_for_probe()
        one.health.record_probe(one.now_s, well=False)
    assert one.state() is HealthState.DOWN

    one.ends(Outcome.GOOD)
    assert one.state() is HealthState.HEALTHY
    for _ in range(later):
        one.wait_for_probe()
        one.health.record_probe(one.now_s, well=False)

    assert one.state() is (HealthState.DOWN if later >= DOWN_AFTER else HealthState.HEALTHY)
    if later == DOWN_AFTER:
        assert one.wait_for_probe() == POLICY.probe_backoff_s


@pytest.mark.fault(14)
def test_an_answer_that_begins_ends_an_outage_like_one_that_has_ended(one: Watched) -> None:
    for _ in range(3):
        one.wait_for_probe()
        one.health.record_probe(one.now_s, well=False)
    one.health.record_answer(one.now_s)
    one.wait_for_probe()
    one.health.record_probe(one.now_s, well=False)

    assert one.state() is HealthState.HEALTHY
    assert one.became == [HealthState.DOWN, HealthState.HEALTHY]


@pytest.mark.parametrize(("random", "factor"), [(0.0, 0.9), (0.5, 1.0), (1.0, 1.1)])
def test_delays_between_probes_have_jitter(one: Watched, random: float, factor: float) -> None:
    one.random = random
    for well, delay_s in [(True, 5.0), (False, 5.0), (False, 5.0), (False, 1.0), (False, 2.0)]:
        one.probe(well=well)
        one.now_s += delay_s * factor - 0.01
        assert not one.health.probe_due(one.now_s)
        one.now_s += 0.02


def test_an_observer_that_raises_does_not_end_the_probes() -> None:
    def raises(_: HealthState) -> None:
        raise LookupError

    health = Health(POLICY, 0.0, raises, lambda: 0.5)
    assert health.probe_due(0.0)
    for _ in range(DOWN_AFTER - 1):
        health.record_probe(0.0, well=False)
    with pytest.raises(LookupError):
        health.record_probe(0.0, well=False)

    assert health.probe_due(POLICY.probe_backoff_s)


def test_an_ejected_instance_that_fails_a_probe_is_down(one: Watched) -> None:
    one.probe(well=True)
    one.ends(*[Outcome.BAD] * 5)
    assert one.state() is HealthState.EJECTED

    one.probe(well=False)  # at once, not after five seconds
    assert one.state() is HealthState.DOWN


def test_a_probe_is_asked_for_once(one: Watched) -> None:
    assert one.health.probe_due(0.0)
    assert not one.health.probe_due(1000.0)


def test_an_overloaded_instance_is_busy_and_not_ejected(one: Watched) -> None:
    for _ in range(10):
        one.health.request_ended(
            Outcome.BUSY, one.now_s, begun=one.health.request_begun(), rest_s=7.0
        )

    assert one.state() is HealthState.HEALTHY
    assert one.health.is_busy(6.9)
    assert not one.health.is_busy(7.0)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UpstreamUnreachable("x"), Outcome.UNREACHABLE),
        (UpstreamFailed("x"), Outcome.BAD),
        (UpstreamTimeout("x"), Outcome.BAD),
        (UpstreamBusy("x"), Outcome.BUSY),
        (UpstreamDenied("x"), Outcome.NOTHING),
        (BadRequest("x"), Outcome.NOTHING),
        (Overloaded("x"), Outcome.NOTHING),
        (ProxyError("x"), Outcome.NOTHING),
    ],
)
def test_errors_judge_the_instance_by_their_class(error: ProxyError, outcome: Outcome) -> None:
    assert error.outcome is outcome


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, Outcome.GOOD),
        (401, Outcome.NOTHING),
        (403, Outcome.NOTHING),
        (404, Outcome.GOOD),
        (408, Outcome.NOTHING),
        (422, Outcome.GOOD),
        (429, Outcome.BUSY),
        (500, Outcome.BAD),
        (502, Outcome.BAD),
        (503, Outcome.BUSY),
    ],
)
def test_statuses_judge_the_instance(status: int, outcome: Outcome) -> None:
    error = UpstreamRejected(status, b"", stage="decode", headers={})

    assert error.outcome is outcome


class AnyHistory(RuleBasedStateMachine):
    """State machine: after any history, a healthy instance returns."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Watched()
        self.under_way: list[int] = []

    @rule()
    def begin(self) -> None:
        self.under_way.append(self.one.health.request_begun())

    @rule(outcome=st.sampled_from(Outcome))
    def end(self, outcome: Outcome) -> None:
        if self.under_way:
            self.one.health.request_ended(outcome, self.one.now_s, begun=self.under_way.pop(0))

    @rule()
    def answer(self) -> None:
        if self.under_way:
            self.one.health.record_answer(self.one.now_s)

    @rule(seconds=st.floats(0, 400))
    def wait(self, seconds: float) -> None:
        self.one.now_s += seconds

    @rule(well=st.booleans())
    def probe(self, well: bool) -> None:
        if self.one.health.probe_due(self.one.now_s):
            self.one.health.record_probe(self.one.now_s, well=well)

    @invariant()
    def only_eligible_instances_get_requests(self) -> None:
        if self.one.health.is_eligible(self.one.now_s):
            assert self.one.state() in {HealthState.HEALTHY, HealthState.TRIAL}

    @invariant()
    def no_change_is_reported_twice(self) -> None:
        assert all(a is not b for a, b in zip(self.one.became, self.one.became[1:], strict=False))

    def teardown(self) -> None:
        while self.under_way:
            self.end(Outcome.NOTHING)
        self.one.now_s += 1000
        if self.one.health.probe_due(self.one.now_s):
            self.one.health.record_probe(self.one.now_s, well=True)
        self.one.ends(Outcome.GOOD)
        assert self.one.state() is HealthState.HEALTHY


TestAnyHistory = AnyHistory.TestCase
