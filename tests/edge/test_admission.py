import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from epd.config import ProxyConfig
from epd.edge.admission import Admission
from epd.edge.fair_queue import FairQueue, Ticket
from epd.edge.tenant_use import RateLimiter, TenantUse
from epd.errors import Overloaded, TooManyRequests, TryLater
from epd.tenants import Tenant

ALICE, BOB, CAROL = (Tenant(name) for name in ("alice", "bob", "carol"))
TENANTS = (ALICE, BOB, CAROL)
LIMITS = {"max_requests": 2, "max_queue": 2, "max_inflight_bytes": 100, "api_keys_file": None}


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


def config(**more: int) -> ProxyConfig:
    urls = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
    return ProxyConfig.model_validate(urls | {"api_keys_file": "keys"} | more)


def admission(clock: Callable[[], float] | None = None, **limits: float | str) -> Admission:
    """Return an admission control with limits below those that a configuration may have."""
    return Admission(config().model_copy(update=LIMITS | limits), clock or Clock())


@contextmanager
def arriving(admitted: Admission, tenant: Tenant) -> Iterator[Ticket]:
    with admitted.request(tenant) as request:
        yield request.enter_queue()


def entered(door: FairQueue, tenant: Tenant) -> Ticket:
    ticket = door.enter_queue(tenant)
    assert ticket is not None
    return ticket


def refusal(act: Callable[[], object]) -> TryLater | None:
    try:
        act()
    except TryLater as refused:
        return refused
    return None


def reasons(admitted: Admission, act: Callable[[], object]) -> Sequence[str]:
    """Return the reason of a rejection, as counted; empty if the act is admitted."""
    before = admitted.refused.copy()
    refused = refusal(act)
    counted = [*(admitted.refused - before)]
    assert len(counted) == (refused is not None)
    return counted


class DoorMachine(RuleBasedStateMachine):
    """State machine with requests that come and go in any order, and a list of the waiting ones."""

    tickets = Bundle[Ticket]("tickets")

    @initialize(slots=st.integers(1, 4), queue=st.integers(0, 6))
    def open(self, slots: int, queue: int) -> None:
        self.door, self.slots, self.queue = FairQueue(slots, queue), slots, queue
        self.here: list[Ticket] = []
        self.waited: list[Ticket] = []
        self.passed_by = dict.fromkeys(TENANTS, 0)

    @rule(target=tickets, tenant=st.sampled_from(TENANTS))
    def arrive(self, tenant: Tenant) -> Ticket:
        mine = sum(ticket.tenant == tenant for ticket in self.waited)
        lines = [sum(t.tenant == other for t in self.waited) for other in TENANTS]
        ticket = self.door.enter_queue(tenant)
        if ticket is None:
            assert len(self.waited) == self.queue
            assert max(lines) <= mine + 1
            return Ticket(tenant, "displaced")
        self.here.append(ticket)
        for other in [other for other in self.waited if other.state == "displaced"]:
            assert len(self.waited) == self.queue
            last = [one for one in self.waited if one.tenant == other.tenant][-1]
            assert other is last
            assert other.tenant != tenant
            self.waited.remove(other)
        if ticket.state == "queued":
            self.waited.append(ticket)
        return ticket

    @rule(ticket=consumes(tickets))
    def leave(self, ticket: Ticket) -> None:
        if ticket not in self.here:  # it was rejected
            return
        self.here.remove(ticket)
        was_inside = ticket.state == "running"
        self.door.leave_queue(ticket)
        if ticket in self.waited:
            self.waited.remove(ticket)
        entered = [other for other in self.waited if other.state == "running"]
        assert len(entered) == (1 if was_inside and self.waited else 0)
        for one in entered:
            assert one is next(other for other in self.waited if other.tenant == one.tenant)
            self.waited.remove(one)
            self._count_turn(one.tenant)

    def _count_turn(self, tenant: Tenant) -> None:
        self.passed_by[tenant] = 0
        for other in {ticket.tenant for ticket in self.waited} - {tenant}:
            self.passed_by[other] += 1
            assert self.passed_by[other] < len(TENANTS)

    @invariant()
    @precondition(lambda self: hasattr(self, "door"))
    def is_consistent(self) -> None:
        inside = [ticket for ticket in self.here if ticket.state == "running"]
        assert self.door.running == len(inside) <= self.slots
        assert self.door.queued == len(self.waited) <= self.queue
        assert all(ticket.state == "queued" for ticket in self.waited)
        assert not self.waited or len(inside) == self.slots
        waiting = {ticket.tenant for ticket in self.waited}
        # A request that leaves the queue and returns is behind all others.
        self.passed_by = {one: n if one in waiting else 0 for one, n in self.passed_by.items()}

    def teardown(self) -> None:
        if hasattr(self, "door"):
            for ticket in self.here:
                self.door.leave_queue(ticket)
            assert (self.door.running, self.door.queued) == (0, 0)


TestDoor = DoorMachine.TestCase


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(TENANTS)),
        st.tuples(st.sampled_from(["end", "cancel"]), st.integers(0, 20)),
        st.tuples(st.sampled_from(["tick", "late"]), st.none()),
    ),
    max_size=40,
)


class Visits:
    """Requests as tasks, and their outcomes."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.ends: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.outcomes: list[str] = []

    def come(self, tenant: Tenant) -> None:
        end = asyncio.Event()
        self.ends.append(end)
        self.tasks.append(asyncio.create_task(self._visit(tenant, end)))

    async def _visit(self, tenant: Tenant, end: asyncio.Event) -> None:
        outcome = "cancelled"
        try:
            with self.admission.request(tenant) as held:
                await self.admission.wait_slot(held.enter_queue())
                held.grow(40)
                await end.wait()
                outcome = "served"
        except TryLater as refused:
            outcome = refused.slug
        finally:
            self.outcomes.append(outcome)

    async def step(self, act: str, which: Tenant | int | None) -> None:
        match act, which:
            case "come", Tenant():
                self.come(which)
            case "end", int() if which < len(self.ends):
                self.ends[which].set()
            case "cancel", int() if which < len(self.tasks):
                self.tasks[which].cancel()
            case "tick", _:
                await asyncio.sleep(0)
            case "late", _:
                await asyncio.sleep(0.002)


@given(STEPS)
def test_each_request_ends_once_and_releases_its_place(
    steps: Sequence[tuple[str, Tenant | int | None]],
) -> None:
    async def run() -> None:
        admitted = admission(queue_timeout_s=0.001, tenant_max_requests=3)
        visits = Visits(admitted)
        for act, which in steps:
            await visits.step(act, which)
            assert 0 <= admitted.queue.running <= 2
            assert 0 <= admitted.queue.queued <= 2
            assert 0 <= admitted.body_bytes <= 100
        for task in visits.tasks:
            task.cancel()
        await asyncio.gather(*visits.tasks, return_exceptions=True)

        # A task that is cancelled before it starts has no outcome.
        assert len(visits.outcomes) <= len(visits.tasks)
        refused = sum(outcome not in {"served", "cancelled"} for outcome in visits.outcomes)
        assert refused == sum(admitted.refused.values())
        assert (admitted.queue.running, admitted.queue.queued, admitted.body_bytes) == (0, 0, 0)
        for tenant in TENANTS:  # all slots are free again
            with ExitStack() as stack:
                for _ in range(2):
                    stack.enter_context(arriving(admitted, tenant))

    asyncio.run(run())


async def test_a_place_granted_to_a_disconnecting_client_is_passed_on() -> None:
    visits = Visits(admission(max_requests=1))
    for tenant in TENANTS:
        visits.come(tenant)
    await asyncio.sleep(0)
    visits.ends[0].set()
    visits.tasks[1].cancel()
    visits.ends[2].set()
    await asyncio.wait(visits.tasks, timeout=60)

    assert visits.outcomes == ["served", "cancelled", "served"]


async def test_a_request_that_waits_too_long_gets_a_retry_after() -> None:
    admitted = admission(max_requests=1, queue_timeout_s=0.001)
    with arriving(admitted, ALICE):
        with (
            arriving(admitted, BOB) as ticket,
            pytest.raises(Overloaded, match="too long in the queue"),
        ):
            await admitted.wait_slot(ticket)

        assert (admitted.queue.running, admitted.queue.queued) == (1, 0)
    assert admitted.refused == {"queue_timeout": 1}


def test_tenants_take_turns_and_each_comes_in_its_own_order() -> None:
    door = FairQueue(1, 9)
    first = entered(door, ALICE)
    alice = [entered(door, ALICE) for _ in range(3)]
    bob = [entered(door, BOB) for _ in range(2)]
    carol = entered(door, CAROL)
    order = []
    inside = first
    while door.queued:
        door.leave_queue(inside)
        inside = next(t for t in (*alice, *bob, carol) if t.state == "running" and t not in order)
        order.append(inside)

    assert order == [alice[0], bob[0], carol, alice[1], bob[1], alice[2]]


async def test_a_full_queue_rejects_from_its_longest_line() -> None:
    admitted = admission(max_requests=1, max_queue=4)
    with ExitStack() as stack:
        alice = [stack.enter_context(arriving(admitted, ALICE)) for _ in range(5)]
        bob = [stack.enter_context(arriving(admitted, BOB)) for _ in range(2)]

        assert [ticket.state for ticket in alice[1:]] == ["queued"] * 2 + ["displaced"] * 2
        assert [ticket.state for ticket in bob] == ["queued"] * 2
        for tenant in (ALICE, BOB):
            with pytest.raises(TooManyRequests) as refused:
                stack.enter_context(arriving(admitted, tenant))
            assert refused.value.slug == "queue_full"
        with pytest.raises(TooManyRequests, match="queue of waiting requests"):
            await admitted.wait_slot(alice[4])


def test_tenants_do_not_displace_each_others_requests_in_turns() -> None:
    door = FairQueue(1, 3)
    door.enter_queue(CAROL)
    waiting = [entered(door, tenant) for tenant in (ALICE, ALICE, BOB)]
    for _ in range(3):
        for tenant in (BOB, ALICE):
            assert door.enter_queue(tenant) is None

    assert [ticket.state for ticket in waiting] == ["queued"] * 3


def test_a_tenant_has_so_many_at_once_those_that_wait_included() -> None:
    admitted = admission(max_requests=1, max_queue=9, tenant_max_requests=2)
    with ExitStack() as stack:
        stack.enter_context(arriving(admitted, ALICE))
        with arriving(admitted, ALICE):
            refused = refusal(lambda: stack.enter_context(arriving(admitted, ALICE)))
            assert isinstance(refused, TooManyRequests)
            assert refused.slug == "rate_limited"
            stack.enter_context(arriving(admitted, BOB))
        stack.enter_context(arriving(admitted, ALICE))


@given(st.lists(st.tuples(st.integers(0, 70), st.booleans()), max_size=20))
def test_bodies_never_exceed_the_budget_and_it_is_released(
    growths: list[tuple[int, bool]],
) -> None:
    admitted = admission()
    with ExitStack() as stack:
        bodies = [stack.enter_context(admitted.request(ALICE)) for _ in range(2)]
        for size, second in growths:
            held = bodies[second]
            before, other = held.size, bodies[not second].size
            refused = refusal(partial(held.grow, size))
            assert (refused is not None) == (max(before, size) + other > 100)
            assert held.size == (before if refused else max(before, size))
            assert admitted.body_bytes == held.size + other <= 100
    assert admitted.body_bytes == 0


@given(st.lists(st.integers(0, 4), max_size=400), st.lists(st.integers(1, 100), min_size=5))
def test_bodies_that_arrive_at_the_same_time_never_stop_each_other(
    turns: list[int], sizes: list[int]
) -> None:
    """A body without room is refused and frees its bytes, so the last ones always fit."""
    admitted = admission()
    bodies = {number: admitted.request(ALICE) for number in range(5)}
    arrived = dict.fromkeys(bodies, 0)
    complete = set[int]()
    for number in (*turns, *sorted(range(5)) * 100):
        size = sizes[number]
        if number not in bodies or number in complete:
            continue
        arrived[number] += 1
        if refusal(partial(bodies[number].grow, min(size, 2 * arrived[number]))):
            bodies.pop(number).release()
            assert 2 * (arrived[number] - 1) < size  # before the last byte of its first half
        elif arrived[number] == size:
            complete.add(number)
        assert admitted.body_bytes <= 100

    assert complete == set(bodies) != set()


@pytest.mark.security("S24")
def test_a_tenants_bodies_leave_room_for_anothers() -> None:
    admitted = admission(max_body_bytes=50, api_keys_file="keys")
    with ExitStack() as stack:
        first, second = (stack.enter_context(admitted.request(ALICE)) for _ in range(2))
        first.grow(40)
        refused = refusal(partial(second.grow, 11))
        second.grow(10)
        stack.enter_context(admitted.request(BOB)).grow(50)

        assert isinstance(refused, TooManyRequests)
        assert refused.slug == "rate_limited"
        assert admitted.refused == {"tenant_bytes": 1}
    with admitted.request(ALICE) as held:
        held.grow(50)


@given(st.integers(1, 200), st.lists(st.floats(0, 40), max_size=120))
def test_a_tenant_has_at_most_twice_its_limit_in_a_minute(limit: int, gaps: list[float]) -> None:
    pace, use, now_s, admitted = RateLimiter(limit), TenantUse(), 1e6, list[float]()
    for gap_s in gaps:
        now_s += gap_s
        if not pace.take_token(use, now_s):
            admitted.append(now_s)
    for start_s in admitted:
        assert sum(start_s <= at < start_s + 60 for at in admitted) <= 2 * limit


@given(st.lists(st.integers(0, 40), min_size=1, max_size=120))
def test_a_tenant_within_its_limit_per_minute_is_never_refused(gaps: list[int]) -> None:
    times = [1e6 + sum(gaps[: n + 1]) for n in range(len(gaps))]
    busiest = max(sum(start <= at <= start + 60 for at in times) for start in times)
    pace, use = RateLimiter(busiest), TenantUse()

    assert [pace.take_token(use, at) for at in times] == [0.0] * len(times)


@given(st.floats(0.1, 500), st.integers(1, 40))
def test_retry_after_of_a_rate_limit_is_exact(per_minute: float, count: int) -> None:
    pace, use, now_s, waits = RateLimiter(per_minute), TenantUse(), 0.0, list[float]()
    for _ in range(count):
        while (wait_s := pace.take_token(use, now_s)) > 0:
            waits.append(wait_s)
            now_s += wait_s + 1e-9
    assert all(wait_s <= 60 / per_minute * (1 + 1e-6) for wait_s in waits)
    assert len(waits) <= count
    assert pace.take_token(TenantUse(), now_s) == 0.0


@pytest.mark.fault(66)
def test_retry_after_uses_a_monotonic_clock() -> None:
    clock = Clock()
    admitted = admission(clock, tenant_requests_per_minute=2)
    for _ in range(2):
        admitted.keep_pace(ALICE)
    refused = refusal(lambda: admitted.keep_pace(ALICE))
    admitted.keep_pace(BOB)

    assert isinstance(refused, TooManyRequests)
    assert refused.headers["Retry-After"] == "30"
    clock.now += 30
    admitted.keep_pace(ALICE)


def test_a_worker_has_its_share_of_places_and_all_limits_of_tenants() -> None:
    settings = {"workers": 4, "max_requests": 400, "max_queue": 3, "max_inflight_bytes": 4096}
    tenant_settings = {"tenant_max_requests": 2, "tenant_requests_per_minute": 2}
    admitted = Admission(config(**settings, **tenant_settings), Clock())
    with ExitStack() as stack:
        for number in range(50):
            for _ in range(2):
                stack.enter_context(arriving(admitted, Tenant(str(number))))
        assert admitted.queue.running == 100
        assert reasons(admitted, lambda: stack.enter_context(arriving(admitted, ALICE))) == [
            "queue_full"
        ]
        assert reasons(admitted, lambda: stack.enter_context(arriving(admitted, Tenant("1")))) == [
            "tenant_requests"
        ]
    for _ in range(2):
        admitted.keep_pace(ALICE)
    assert reasons(admitted, lambda: admitted.keep_pace(ALICE)) == ["tenant_rate"]
    with admitted.request(ALICE) as alice, admitted.request(BOB) as bob:
        alice.grow(1024)
        assert reasons(admitted, lambda: alice.grow(1025)) == ["tenant_bytes"]
        assert reasons(admitted, lambda: bob.grow(1)) == ["body_bytes"]


def test_a_tenant_without_a_limit_has_all_places() -> None:
    admitted = Admission(config(max_requests=9), Clock())
    with ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(arriving(admitted, ALICE))
        assert admitted.queue.running == 9


@pytest.mark.parametrize(
    ("settings", "tenant_bytes"),
    [
        ({"max_body_bytes": 1024}, 2**29),
        ({"workers": 8}, 2**27),
        ({"workers": 16}, 2**26),
    ],
)
def test_a_tenant_may_have_half_of_the_bytes_and_one_body_at_least(
    settings: dict[str, int], tenant_bytes: int
) -> None:
    admitted = Admission(config(**settings), Clock())
    with admitted.request(ALICE) as request:
        request.grow(tenant_bytes)
        assert reasons(admitted, lambda: request.grow(tenant_bytes + 1)) == ["tenant_bytes"]


def test_one_tenant_may_have_all_bytes_without_keys() -> None:
    admitted = Admission(config().model_copy(update={"api_keys_file": None}), Clock())
    with admitted.request(ALICE) as request:
        request.grow(2**30)
        assert reasons(admitted, lambda: request.grow(2**30 + 1)) == ["body_bytes"]
