"""Encode work of an instance: its speed, and the forecasts by it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import UpstreamUnreachable
from epd.routing.encode_work import EXPIRES_AFTER_S, EncodeWork
from epd.routing.forecast import Forecast, consumer_load, encode_work_s, mean_token_s
from epd.routing.instances import Instance, Role
from epd.routing.reports import Report
from epd.routing.table import InstanceTable, Work
from tests.support.clock import Clock

E1, E2, E3 = (Instance(Role.ENCODE, f"http://e{number}:1") for number in (1, 2, 3))
PD = Instance(Role.PREFILL_DECODE, "http://pd:1")
TOKEN_S = 0.0001


def answer(table: InstanceTable, clock: Clock, tokens: int, seconds: float, at: Instance) -> None:
    """Encode a request alone."""
    with table.track_request(at, work=Work(encode_tokens=tokens)):
        clock.now_s += seconds


def learned(clock: Clock, *instances: Instance) -> InstanceTable:
    """Return a table in which the speed of these encode instances is known."""
    table = InstanceTable([*instances, PD], clock=clock)
    for one in instances:
        for tokens in (1, 100, 1000, 100):
            answer(table, clock, tokens, TOKEN_S * tokens, one)
    return table


def test_time_of_each_token_is_the_mean_of_the_latest_answers() -> None:
    clock = Clock()
    table = learned(clock, E1)
    assert table.load(E1).encode.token_s == pytest.approx(TOKEN_S)
    for _ in range(200):
        answer(table, clock, 100, 0.2, E1)

    assert table.load(E1).encode.token_s == pytest.approx(0.002, rel=0.01)


def test_first_answer_is_not_learned() -> None:
    clock = Clock()
    table = InstanceTable([E1], clock=clock)
    answer(table, clock, 100, 60.0, E1)
    first = table.load(E1).encode.token_s
    answer(table, clock, 100, 1.0, E1)

    assert first is None
    assert table.load(E1).encode.token_s == pytest.approx(0.01)


def test_wait_behind_other_requests_is_not_learned() -> None:
    clock = Clock()
    table = learned(clock, E1)
    before = table.load(E1).encode.token_s
    first, second = (table.track_request(E1, work=Work(encode_tokens=1000)) for _ in range(2))
    for one in (first, second):
        one.begin_request()
    for one in (first, second):
        clock.now_s += TOKEN_S * 1000
        one.end_request()

    assert before is not None
    assert table.load(E1).encode.token_s == pytest.approx(before)


def test_time_for_requests_of_other_clients_is_not_learned() -> None:
    clock = Clock()
    table = learned(clock, E1, E2)
    table.reports_due(1.0)
    table.record_report(E1, Report(0, 3, {}), 1e6)
    answer(table, clock, 1000, 4 * TOKEN_S * 1000, E1)

    assert table.load(E1).encode.token_s == pytest.approx(TOKEN_S)


def test_failed_request_is_not_learned_and_leaves_no_tokens() -> None:
    clock = Clock()
    table = learned(clock, E1)
    using = table.track_request(E1, work=Work(encode_tokens=70)).begin_request()
    during = table.load(E1).encode.tokens
    clock.now_s += 50
    using.end_request(UpstreamUnreachable("down", slug="down", stage="encode"))

    assert (during, table.load(E1).encode.tokens) == (70, 0)
    assert table.load(E1).encode.token_s == pytest.approx(TOKEN_S)


def test_speed_expires_and_is_learned_again_without_the_old_answers() -> None:
    clock = Clock()
    table = learned(clock, E1)
    clock.now_s += EXPIRES_AFTER_S
    expired = table.load(E1).encode.token_s
    answer(table, clock, 100, 1.0, E1)

    assert expired is None
    assert table.load(E1).encode.token_s == pytest.approx(0.01)


def test_speed_of_a_removed_instance_is_forgotten() -> None:
    clock = Clock()
    table = learned(clock, E1)
    table.remove(E1)
    table.add(E1)

    assert table.load(E1).encode.token_s is None


SECONDS = st.integers(0, 30_000).map(lambda milliseconds: milliseconds / 1000)
ANSWERS = st.lists(st.tuples(st.integers(1, 20_000), SECONDS), max_size=40)


@given(ANSWERS)
def test_speed_is_not_negative_and_explains_the_busy_time(
    answers: list[tuple[int, float]],
) -> None:
    clock = Clock()
    work = EncodeWork(clock)
    for tokens, seconds in answers:
        started_s = clock.now_s
        clock.now_s += seconds
        work.learn_answer(tokens, started_s, 1.0)
    token_s = work.token_s

    assert (token_s is None) == (len(answers) < 2)
    if token_s is not None:
        total_s = sum(seconds for _, seconds in answers[1:])
        assert token_s >= 0
        assert (token_s > 0) == (total_s > 0)


def test_mean_speed_covers_only_measured_instances() -> None:
    clock = Clock()
    table = InstanceTable([E1, E2, E3], clock=clock)
    for instance, seconds in ((E1, 1.0), (E2, 3.0)):
        answer(table, clock, 100, 60.0, instance)
        answer(table, clock, 100, seconds, instance)

    assert mean_token_s([table.load(each) for each in (E1, E2, E3)]) == pytest.approx(0.02)
    assert mean_token_s([table.load(E3)]) is None


def test_forecast_of_an_idle_instance_is_the_time_of_the_item() -> None:
    queue = Forecast(learned(Clock(), E1)).best_queue(1000, "key")

    assert queue is not None
    assert queue.finish_s(1000) == pytest.approx(0.1)


def test_forecast_counts_the_queue_and_the_items_before() -> None:
    clock = Clock()
    table = learned(clock, E1)
    with table.track_request(E1, work=Work(encode_tokens=500)):
        queue = Forecast(table).best_queue(100, "key")
        assert queue is not None
        queue.add_item(100)

    assert queue.finish_s(1000) == pytest.approx(TOKEN_S * 1600)


def test_forecast_counts_requests_of_other_clients_as_the_mean() -> None:
    clock = Clock()
    table = learned(clock, E1, E2)
    table.reports_due(1.0)
    table.record_report(E1, Report(1, 1, {}), 1e6)
    forecast = Forecast(table, fits=lambda one: one == E1)
    mean = table.load(E1).encode.mean_tokens

    queue = forecast.best_queue(10, "key")
    assert queue is not None
    assert queue.finish_s(10) == pytest.approx(TOKEN_S * (10 + 2 * mean))


def nearest(table: InstanceTable) -> set[Instance]:
    queues = [Forecast(table).best_queue(10, str(key)) for key in range(20)]
    return {one.instance for one in queues if one is not None}


def test_best_queue_is_the_earliest_and_equal_ones_go_by_the_key() -> None:
    table = learned(Clock(), E1, E2)
    equal = nearest(table)
    with table.track_request(E1, work=Work(encode_tokens=50)):
        busy = nearest(table)

    assert (equal, busy) == ({E1, E2}, {E2})


def test_instance_of_unknown_speed_counts_as_the_mean_of_the_others() -> None:
    clock = Clock()
    table = learned(clock, E1)
    table.add(E2)
    with table.track_request(E1):
        queue = Forecast(table).best_queue(10, "key")

    assert queue is not None
    assert queue.instance == E2
    assert queue.finish_s(10) == pytest.approx(TOKEN_S * 10)


def test_no_encode_instance_has_no_queue() -> None:
    forecast = Forecast(InstanceTable([PD]))

    assert (forecast.token_s, forecast.best_queue(1, "key")) == (None, None)


def test_consumer_counts_its_requests_and_its_local_items() -> None:
    table = InstanceTable([E1, PD])
    assert consumer_load(table, None) == (0, 0)
    with table.track_request(PD, work=Work(encode_tokens=300)), table.track_request(PD):
        assert consumer_load(table, None) == (2, 300)
        # The request's own place is not another request.
        assert consumer_load(table, PD) == (1, 300)


def test_consumer_with_ranks_counts_by_engine() -> None:
    ranks = Instance(Role.PREFILL_DECODE, "http://pd:1", dp_size=4)
    table = InstanceTable([ranks])
    with table.track_request(ranks, work=Work(encode_tokens=400)):
        assert consumer_load(table, None) == (0.25, 100)


def test_local_encode_ends_with_the_answer() -> None:
    table = InstanceTable([PD])
    using = table.track_request(PD, work=Work(prompt_tokens=70, encode_tokens=30)).begin_request()
    load = table.load(PD)
    during = load.encode.tokens, load.pending_tokens
    using.record_answer()
    after = load.encode.tokens, load.pending_tokens
    using.end_request()

    assert (during, after) == ((30, 70), (0, 0))
    assert (load.encode.tokens, load.pending_tokens, load.encode.token_s) == (0, 0, None)


def test_backlog_of_encode_instances_is_their_time() -> None:
    clock = Clock()
    table = learned(clock, E1)
    table.add(E2)
    with table.track_request(E1, work=Work(0, 500)), table.track_request(E2, work=Work(0, 100)):
        loads = [table.load(one) for one in (E1, E2)]
        assert encode_work_s(loads) == pytest.approx(TOKEN_S * 600)

    assert encode_work_s(loads) == 0
