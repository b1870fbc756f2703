"""Requests and rates of tenants over several workers that share memory."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.edge.tenant_use import MAX_SHARED, RateLimiter, SharedUse, TenantLedger, TenantUse

WORKERS = 3


def new_memory(workers: int = WORKERS) -> memoryview:
    return memoryview(bytearray(TenantLedger.size_bytes(workers)))


def uses_of(name: str, memory: memoryview, workers: int = WORKERS) -> list[TenantUse]:
    """Return the use of a tenant in each worker. Each worker maps the memory by itself."""
    return [TenantLedger(memory, workers).use_of(worker, name) for worker in range(workers)]


@given(
    steps=st.lists(st.tuples(st.integers(0, WORKERS - 1), st.booleans())), limit=st.integers(1, 5)
)
def test_workers_together_admit_the_limit_exactly(
    steps: list[tuple[int, bool]], limit: int
) -> None:
    uses, admitted = uses_of("alice", new_memory()), [0] * WORKERS
    for worker, ends in steps:
        use, before = uses[worker], sum(admitted)
        if ends and admitted[worker]:
            use.end_request()
            admitted[worker] -= 1
        elif not ends:
            use.begin_request()
            if use.total_requests() > limit:
                use.end_request()
                assert before == limit
            else:
                admitted[worker] += 1

    assert sum(admitted) <= limit
    assert {use.total_requests() for use in uses} == {sum(admitted)}


@given(
    asked=st.lists(st.tuples(st.integers(0, WORKERS - 1), st.floats(0, 90)), max_size=60),
    per_minute=st.integers(1, 20),
)
def test_workers_together_decide_rates_like_one_process(
    asked: list[tuple[int, float]], per_minute: int
) -> None:
    pace, uses, alone, now_s = RateLimiter(per_minute), uses_of("a", new_memory()), TenantUse(), 1e6
    for worker, pause_s in asked:
        now_s += pause_s
        assert pace.take_token(uses[worker], now_s) == pace.take_token(alone, now_s)


def test_workers_that_admit_at_the_same_moment_see_each_other() -> None:
    one, other, _ = uses_of("alice", new_memory())
    one.begin_request()
    other.begin_request()

    assert (one.total_requests(), other.total_requests()) == (2, 2)


def test_tenants_are_counted_separately() -> None:
    memory = new_memory()
    names = [f"tenant-{number}" for number in range(200)]
    uses = [uses_of(name, memory) for name in names]
    for number, of_tenant in enumerate(uses):
        for _ in range(number):
            random.choice(of_tenant).begin_request()  # noqa: S311 - any worker

    assert [of_tenant[0].total_requests() for of_tenant in uses] == [*range(200)]


def test_other_workers_count_a_new_tenant_later() -> None:
    memory = new_memory(2)
    ledger = TenantLedger(memory, 2)
    first = ledger.use_of(0, "alice")
    first.begin_request()
    assert first.total_requests() == 1
    ledger.use_of(1, "bob").begin_request()
    second = ledger.use_of(1, "alice")
    second.begin_request()

    assert (first.total_requests(), second.total_requests()) == (2, 2)


def test_a_dead_worker_leaves_its_rates_and_no_requests() -> None:
    memory, pace = new_memory(2), RateLimiter(1)
    dead, other = uses_of("alice", memory, 2)
    dead.begin_request()
    assert pace.take_token(dead, 100.0) == 0.0
    TenantLedger(memory, 2).forget_requests(0)

    assert other.total_requests() == 0
    assert pace.take_token(other, 100.0) == pytest.approx(60)
    assert pace.take_token(TenantLedger(memory, 2).use_of(0, "alice"), 100.0) == pytest.approx(60)


def test_tenants_beyond_the_shared_ones_are_counted_per_worker() -> None:
    memory = new_memory(2)
    ledger = TenantLedger(memory, 2)
    keys = memory[: 8 * MAX_SHARED].cast("Q")
    for slot in range(MAX_SHARED - 1):
        keys[slot] = 2 * slot + 3

    assert type(ledger.use_of(0, "last")) is SharedUse
    assert type(ledger.use_of(0, "one more")) is TenantUse
    assert type(ledger.use_of(1, "one more")) is SharedUse
    assert all(one != other for one, other in pairwise(keys))
