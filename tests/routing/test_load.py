"""Load of an instance, from its reports and the requests in progress."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd.routing.instances import Instance, Role
from epd.routing.load import REPORT_TTL_INTERVALS, Load
from epd.routing.reports import KVMoved, Report
from tests.support.clock import table_of

INTERVAL_S = 1.0
URL = "http://x:1"


def report(requests: int, engines: dict[int, int] | None = None) -> Report:
    return Report(requests // 2, requests - requests // 2, engines or {0: requests})


class Accounts(RuleBasedStateMachine):
    """Instance with correct but old reports, and requests of this proxy and of others."""

    def __init__(self) -> None:
        super().__init__()
        self.load = Load(URL, ranks=2)
        self.now_s = self.until_s = 0.0
        self.here = [0, 0]
        self.elsewhere = [0, 0]
        self.known, self.known_ranks = 0, [0, 0]
        self.asked = False
        self.most, self.most_ranks = 0, [0, 0]
        self.page: list[int] | None = None
        self.others_then = 0

    @rule(rank=st.integers(0, 1))
    def begin(self, rank: int) -> None:
        self.load.begin_request(rank)
        self.here[rank] += 1
        self.most = max(self.most, sum(self.here))
        self.most_ranks = [*map(max, self.most_ranks, self.here)]

    @precondition(lambda self: any(self.here))
    @rule()
    def end(self) -> None:
        rank = 0 if self.here[0] else 1
        self.load.end_request(rank)
        self.here[rank] -= 1

    @rule(rank=st.integers(0, 1), requests=st.integers(0, 9))
    def others(self, rank: int, requests: int) -> None:
        self.elsewhere[rank] = requests

    @precondition(lambda self: not self.asked)
    @rule()
    def ask(self) -> None:
        self._pass(1.2 * INTERVAL_S)
        assert self.load.report_due(self.now_s, 0.0)
        assert not self.load.report_due(self.now_s, 0.0)
        self.asked, self.page = True, None
        self.most, self.most_ranks = sum(self.here), self.here.copy()

    @precondition(lambda self: self.asked and self.page is None)
    @rule()
    def count(self) -> None:
        self.page = [*map(sum, zip(self.here, self.elsewhere, strict=True))]
        self.others_then = sum(self.elsewhere)

    @precondition(lambda self: self.page is not None)
    @rule()
    def answer(self) -> None:
        assert self.page is not None
        self.load.record_report(
            report(sum(self.page), dict(enumerate(self.page))), self.now_s, INTERVAL_S
        )
        self.known = max(0, sum(self.page) - self.most)
        self.known_ranks = [
            max(0, said - most) for said, most in zip(self.page, self.most_ranks, strict=True)
        ]
        assert self.known <= self.others_then
        self.until_s = self.now_s + REPORT_TTL_INTERVALS * INTERVAL_S
        self.asked, self.page = False, None

    @precondition(lambda self: self.asked)
    @rule()
    def fail(self) -> None:
        self.load.record_report(None, self.now_s, INTERVAL_S)
        self.asked, self.page = False, None

    @rule()
    def advance_time(self) -> None:
        self._pass(REPORT_TTL_INTERVALS * INTERVAL_S)

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        self.load.expire_report(self.now_s)
        if self.now_s >= self.until_s:
            self.known, self.known_ranks = 0, [0, 0]

    @invariant()
    def it_is_what_is_here_and_what_was_elsewhere(self) -> None:
        assert self.load.under_way == sum(self.here)
        assert self.load.value == sum(self.here) + self.known
        assert self.load.pressure == self.load.value

    @invariant()
    def the_next_rank_is_one_with_least_to_do(self) -> None:
        totals = [self.here[rank] + self.known_ranks[rank] for rank in range(2)]
        assert totals[self.load.next_rank() or 0] == min(totals)


TestAccounts = Accounts.TestCase


@given(
    asked=st.integers(0, 30),
    since=st.integers(-30, 30),
    said=st.integers(0, 200),
    few=st.booleans(),
)
def test_no_request_from_here_is_counted_twice_and_none_is_left_out(
    asked: int, since: int, said: int, few: bool
) -> None:
    load = Load(URL, weight=0.5 if few else 1.0)
    for _ in range(asked):
        load.begin_request()
    assert load.report_due(0.0, INTERVAL_S)
    for _ in range(abs(since)):
        if since > 0:
            load.begin_request()
        elif load.under_way:
            load.end_request()
    load.record_report(report(said), 0.0, INTERVAL_S)

    assert load.value == load.under_way + max(0, said - max(asked, asked + since))
    assert load.pressure == load.value / load.share


@given(st.integers(1, 8), st.lists(st.booleans(), max_size=60))
def test_ranks_are_loaded_evenly(count: int, steps: list[bool]) -> None:
    load, running = Load(URL, ranks=count), list[int]()
    for begins in steps:
        if begins:
            rank = load.next_rank()
            assert rank is not None
            assert running.count(rank) == min(running.count(one) for one in range(count))
            load.begin_request(rank)
            running.append(rank)
        elif running:
            load.end_request(running.pop(0))


def test_ranks_without_load_take_turns() -> None:
    load = Load(URL, ranks=2)

    assert [load.next_rank() for _ in range(3)] == [0, 1, 0]


def test_an_instance_without_a_report_is_asked_ever_less_often() -> None:
    load, asked = Load(URL), []
    for now_s in range(600):
        if load.report_due(float(now_s), INTERVAL_S):
            asked.append(now_s)
            load.record_report(None, float(now_s), INTERVAL_S)

    assert asked[:6] == [0, 2, 6, 14, 30, 62]
    assert asked[-1] - asked[-2] == 32
    load.report_due(1000.0, INTERVAL_S)
    load.record_report(report(3), 1000.0, INTERVAL_S)
    assert load.report_due(1000.0 + 1.2 * INTERVAL_S, INTERVAL_S)


@pytest.mark.parametrize("said", [report(3), None])
def test_a_changed_report_interval_counts_from_the_last_report(said: Report | None) -> None:
    load = Load(URL)
    load.report_due(0.0, 600.0)
    load.record_report(said, 0.0, 600.0)

    assert not load.report_due(2.5, 600.0)
    assert load.report_due(2.5, 1.0)
    assert not load.report_due(1000.0, 1.0)


def test_instances_are_not_all_asked_at_the_same_time_for_long() -> None:
    loads = [Load(f"http://x{number}:1") for number in range(40)]
    for load in loads:
        load.report_due(0.0, INTERVAL_S)
        load.record_report(report(0), 0.0, INTERVAL_S)
    due = [sum(load.report_due(now_s, INTERVAL_S) for load in loads) for now_s in (0.89, 1.0, 1.11)]

    assert due[0] == 0
    assert min(due[1:]) > 10
    assert sum(due) == len(loads)


def test_ranks_use_the_proxys_own_counts_if_a_report_is_missing() -> None:
    load = Load(URL, ranks=2)
    load.report_due(0.0, INTERVAL_S)
    load.record_report(report(50, {0: 50, 2: 0}), 0.0, INTERVAL_S)

    assert [load.next_rank() for _ in range(4)] == [0, 1, 0, 1]


A, B = (Instance(Role.DECODE, f"http://{name}:1") for name in "ab")


def kv_bandwidths(*moved: tuple[float, float]) -> list[float | None]:
    """Return the bandwidth after each report of these sums of bytes and seconds."""
    load = Load(URL)
    found = []
    for number, sums in enumerate(moved):
        load.record_report(Report(0, 0, {0: 0}, kv_moved=KVMoved(*sums)), number, INTERVAL_S)
        found.append(load.kv_bytes_per_s)
    return found


def test_kv_bandwidth_is_that_of_the_last_reported_transfers() -> None:
    assert kv_bandwidths((1e9, 10), (1e9, 10), (3e9, 11), (3e9, 11)) == [None, None, 2e9, 2e9]
    assert kv_bandwidths((0, 0), (1e9, 4), (2e9, 6)) == [None, 0.25e9, 0.5e9]


def test_kv_bandwidth_ignores_the_sums_of_a_restarted_engine() -> None:
    assert kv_bandwidths((9e9, 9), (1e9, 1), (3e9, 2)) == [None, None, 2e9]


def test_a_down_instance_is_not_polled_and_its_report_is_dropped() -> None:
    table, clock = table_of(A, B)
    for one in table.reports_due(INTERVAL_S):
        table.record_report(one, report(7), INTERVAL_S)
    for _ in range(3):
        table.record_probe(A, well=False)
    clock.now_s = REPORT_TTL_INTERVALS * INTERVAL_S

    assert table.reports_due(INTERVAL_S) == [B]
    assert table.load(A).report is None
    assert (table.load(A).value, table.load(B).value) == (0, 0)


def test_a_report_of_a_removed_instance_is_ignored() -> None:
    table, _ = table_of(A, B)
    table.reports_due(INTERVAL_S)
    table.remove(A)
    table.record_report(A, report(7), INTERVAL_S)
    table.add(A)

    assert table.load(A).value == 0
    assert table.reports_due(INTERVAL_S) == [A]


def test_requests_of_a_recovered_instance_are_still_counted() -> None:
    table, _ = table_of(A, B)
    with table.track_request(A):
        table.remove(A)
        table.add(A)
        assert table.load(A).value == 1
    assert table.load(A).value == 0


def test_an_instance_outside_the_table_is_known_while_it_has_requests() -> None:
    table, _ = table_of(A)
    for number in range(100):
        with table.track_request(Instance(Role.DECODE, f"http://picked{number}:1")):
            assert len(table.under_way) == 1

    assert table.under_way == {}
    assert len(table._leaving) == 1  # noqa: SLF001
