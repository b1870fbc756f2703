"""Consumer: admission within the memory budget, pins, and the cost of a step."""

import random
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from ec_store import Entry, EntryKey
from ec_store.counts import Counts
from ec_store.engine.entry_memory import buffer_bytes
from ec_store.engine.fetcher import Fetcher
from ec_store.entry import payload_bytes
from tests.ec_store.vllm_connector.steps import Connect, Step, counted, put, settle

TOKENS, COLUMNS = 4, 256
ROOM = buffer_bytes(payload_bytes("F32", (TOKENS, COLUMNS)))
"""Bytes of one entry of `Pieces.feature`; a budget of 2.5 entries has room for two."""

WITHIN_S = 30.0


class FakeStore:
    """Store that has every entry, and answers while `go` is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()
        self.go.set()

    def get(self, key: EntryKey) -> Entry:
        self.asked.append(key.identifier)
        self.go.wait(WITHIN_S)
        data = memoryview(bytes(payload_bytes("F32", (TOKENS, COLUMNS))))
        return Entry(data, "F32", (TOKENS, COLUMNS), "image")


class Scheduler:
    """Scheduler that asks like vLLM's: running requests first, then all waiting ones in order."""

    def __init__(self, vllm: Any, store: object, rooms: float, **options: Any) -> None:
        self.vllm = vllm
        self.counts = Counts()
        memory_bytes = round(rooms * ROOM)
        self.fetcher = Fetcher(store, "ns", memory_bytes=memory_bytes, **options)  # type: ignore[arg-type]
        self.consumer = vllm.consumer(self.fetcher, self.counts)
        self.most_bytes = 0

    def request(self, name: str, *pictures: str, media: bool = False) -> Any:
        features = [
            self.vllm.feature(one, media=media, offset=2 + TOKENS * place)
            for place, one in enumerate(pictures)
        ]
        request = self.vllm.request(*features)
        request.request_id = name
        return request

    def step(self, *requests: Any) -> list[str]:
        """Return the names of the requests that may be scheduled."""
        ready_for = self.consumer.ensure_items
        ready = [one.request_id for one in requests if ready_for(one, one.num_computed_tokens)]
        self.consumer.end_step()
        gauges = self.fetcher.gauges()
        taken = gauges["held_bytes"] + gauges["queued_bytes"] + gauges["inflight_bytes"]
        self.most_bytes = max(self.most_bytes, int(taken))
        return ready

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def pinned_entries(self) -> int:
        return round(self.fetcher.gauges()["pinned_bytes"] / ROOM)


@pytest.fixture
def schedule(vllm: Any) -> Any:
    """Yield a function that makes schedulers; close their fetchers at the end."""
    made = []

    def make(store: object, rooms: float, **options: Any) -> Scheduler:
        made.append(Scheduler(vllm, store, rooms, **options))
        return made[-1]

    yield make
    for one in made:
        one.consumer.close()


def test_oldest_request_is_admitted_first_and_whole(schedule: Any) -> None:
    """The second request waits until both of its entries have room; the third does not pass it."""
    store = FakeStore()
    scheduler = schedule(store, 3.5)
    first, second, third = (
        scheduler.request("1", "a", "b"),
        scheduler.request("2", "c", "d"),
        scheduler.request("3", "e"),
    )
    waiting = (first, second, third)
    scheduler.until(lambda: scheduler.step(*waiting) == ["1"])
    assert set(store.asked) == {"a", "b"}
    for _ in range(10):
        assert scheduler.step(*waiting) == ["1"]
    first.num_computed_tokens = 2 + 2 * TOKENS
    scheduler.until(lambda: set(scheduler.step(*waiting)) == {"1", "2", "3"})

    assert set(store.asked) == set("abcde")
    assert scheduler.most_bytes <= 3.5 * ROOM


def test_request_is_ready_in_its_first_step_if_lookups_end_in_the_steps_time(schedule: Any) -> None:
    scheduler = schedule(FakeStore(), 9.0, wait_s=WITHIN_S)
    assert scheduler.step(scheduler.request("1", "a", "b"), scheduler.request("2", "c")) == [
        "1",
        "2",
    ]


def test_step_waits_once_for_a_store_that_hangs(
    schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now_s, waited_s = FakeStore(), [0.0], []
    store.go.clear()
    scheduler = schedule(store, 9.0, wait_s=0.5)

    def wait(seconds: float) -> None:
        waited_s.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr(scheduler.fetcher, "wait_for_result", wait)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    first, second = scheduler.request("1", "a"), scheduler.request("2", "b")
    assert scheduler.step(first, second) == []
    assert waited_s == [0.5]
    assert scheduler.step(first, second) == []
    assert waited_s == [0.5]
    assert scheduler.step(first, second, scheduler.request("3", "c")) == []
    assert waited_s == [0.5, 0.5]
    store.go.set()


def test_step_waits_for_no_second_lookup_of_a_promised_entry(
    schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is still being written: its request and another one for it wait between steps."""

    class Empty(FakeStore):
        def get(self, key: EntryKey) -> Entry | None:  # type: ignore[override]
            self.asked.append(key.identifier)
            return None

    store = Empty()
    scheduler = schedule(store, 9.0, wait_s=WITHIN_S)
    wait = scheduler.fetcher.wait_for_result
    monkeypatch.setattr(scheduler.fetcher, "wait_for_result", lambda _: wait(0.05))
    first, second = scheduler.request("1", "a"), scheduler.request("2", "a")
    first.ec_transfer_params = second.ec_transfer_params = {"a": {}}

    assert scheduler.step(first, second) == []
    assert store.asked == ["a"]


def test_request_larger_than_the_budget_is_admitted_by_itself(schedule: Any) -> None:
    scheduler = schedule(FakeStore(), 2.5)
    small, large, last = (
        scheduler.request("small", "a"),
        scheduler.request("large", *"bcdef"),
        scheduler.request("last", "g"),
    )
    waiting = (small, large, last)
    scheduler.until(lambda: scheduler.step(*waiting) == ["small"])
    scheduler.consumer.release("small")
    scheduler.until(lambda: scheduler.step(large, last) == ["large"])
    assert scheduler.pinned_entries() == 5
    assert scheduler.step(large, last) == ["large"]
    scheduler.consumer.release("large")

    scheduler.until(lambda: scheduler.step(last) == ["last"])
    assert scheduler.pinned_entries() == 1


def test_pin_ends_when_the_tokens_of_its_item_are_computed(schedule: Any) -> None:
    scheduler = schedule(FakeStore(), 100)
    request = scheduler.request("r", *"abc")
    scheduler.until(lambda: scheduler.step(request))
    pinned = []
    for computed in (0, 1, 2, 5, 6, 9, 10, 13, 14, 20):
        request.num_computed_tokens = computed
        assert scheduler.step(request) == ["r"]
        pinned.append((computed, scheduler.pinned_entries()))

    ends = [(0, 3), (1, 3), (2, 3), (5, 3), (6, 2), (9, 2), (10, 1), (13, 1), (14, 0), (20, 0)]
    assert pinned == ends
    assert not scheduler.consumer.has("a")


def test_entry_that_came_for_an_item_computed_meanwhile_is_not_pinned(schedule: Any) -> None:
    """The prefix cache has the item's tokens by then, computed by another request."""
    store = FakeStore()
    store.go.clear()
    scheduler = schedule(store, 100)
    request, other = scheduler.request("r", "a", "b"), scheduler.request("s", "c")
    scheduler.step(request)
    store.go.set()
    scheduler.until(
        lambda: scheduler.step(other) and not scheduler.fetcher.gauges()["inflight_bytes"]
    )
    request.num_computed_tokens = 2 + TOKENS
    assert scheduler.step(request) == ["r"]

    assert not scheduler.consumer.has("a")
    assert scheduler.consumer.has("b")


def test_requests_that_only_decode_hold_nothing(schedule: Any) -> None:
    """A hundred requests with one entry each pass through a budget of two, and all keep running."""
    scheduler = schedule(FakeStore(), 2.5)
    running: list[Any] = []
    for number in range(100):
        request = scheduler.request(f"r{number}", f"k{number}")
        scheduler.until(lambda one=request: one.request_id in scheduler.step(*running, one))
        request.num_computed_tokens = 2 + TOKENS
        running.append(request)
    scheduler.step(*running)

    assert scheduler.pinned_entries() == 0
    assert scheduler.most_bytes <= 2.5 * ROOM


def test_a_preempted_request_releases_its_budget_and_is_admitted_again(schedule: Any) -> None:
    """Each request holds half of what the other needs; without a release, both would hang."""
    scheduler = schedule(FakeStore(), 2.5)
    preempted = scheduler.request("preempted", "a", "b")
    scheduler.until(lambda: scheduler.step(preempted))
    preempted.num_computed_tokens = 2 + TOKENS
    scheduler.step(preempted)
    other = scheduler.request("other", "c")
    scheduler.until(lambda: "other" in scheduler.step(preempted, other))
    preempted.num_computed_tokens, preempted.num_preemptions = 0, 1

    assert scheduler.step(preempted, other) == ["other"]
    assert not scheduler.consumer.has("b")
    scheduler.consumer.release("other")
    scheduler.until(lambda: scheduler.step(preempted) == ["preempted"])
    assert scheduler.most_bytes <= 2.5 * ROOM


def test_request_that_lost_tokens_while_it_runs_does_not_wait_for_room(schedule: Any) -> None:
    """It holds blocks of the KV cache that the admitted request may need."""
    scheduler = schedule(FakeStore(), 1.5)
    running = scheduler.request("running", "a", "b")
    scheduler.until(lambda: scheduler.step(running))
    running.num_computed_tokens = 2 + 2 * TOKENS
    scheduler.step(running)
    waiting = scheduler.request("waiting", "c")
    scheduler.until(lambda: "waiting" in scheduler.step(running, waiting))
    running.num_computed_tokens = 3

    scheduler.until(lambda: set(scheduler.step(running, waiting)) == {"running", "waiting"})


def test_items_added_to_a_session_are_fetched(schedule: Any) -> None:
    store = FakeStore()
    scheduler = schedule(store, 10)
    session = scheduler.request("s", "a")
    scheduler.until(lambda: scheduler.step(session))
    session.num_computed_tokens = 2 + TOKENS
    assert scheduler.step(session) == ["s"]
    session.mm_features.append(scheduler.vllm.feature("b", media=False, offset=2 + TOKENS))

    store.go.clear()
    assert scheduler.step(session) == []
    store.go.set()
    scheduler.until(lambda: scheduler.step(session))
    assert scheduler.consumer.has("b")


def test_one_picture_twice_in_a_prompt_is_held_until_its_last_place(schedule: Any) -> None:
    store = FakeStore()
    scheduler = schedule(store, 10)
    request = scheduler.request("r", "a", "a")
    scheduler.until(lambda: scheduler.step(request))
    request.num_computed_tokens = 2 + TOKENS
    scheduler.step(request)
    assert scheduler.consumer.has("a")
    request.num_computed_tokens = 2 + 2 * TOKENS
    scheduler.step(request)

    assert not scheduler.consumer.has("a")
    assert store.asked == ["a"]


@pytest.mark.parametrize("seed", range(5))
def test_all_requests_finish_for_any_sequence_of_events(schedule: Any, seed: int) -> None:
    """Requests arrive, are computed in parts, preempted and aborted; none waits forever."""
    dice = random.Random(seed)  # noqa: S311 - no secret
    scheduler = schedule(FakeStore(), dice.choice([1.5, 2.5, 4.5]))
    arriving = [
        scheduler.request(f"r{n}", *(f"k{dice.randrange(20)}" for _ in range(dice.randint(1, 5))))
        for n in range(40)
    ]
    waiting: list[Any] = []
    running: list[Any] = []
    deadline = time.monotonic() + WITHIN_S
    while arriving or waiting or running:
        assert time.monotonic() < deadline, (len(arriving), len(waiting), len(running))
        waiting += [arriving.pop(0) for _ in range(min(len(arriving), dice.randrange(3)))]
        ready = scheduler.step(*running, *waiting)
        for request in [one for one in waiting if one.request_id in ready][:2]:
            waiting.remove(request)
            running.append(request)
        for request in list(running):
            whole = 2 + TOKENS * len(request.mm_features)
            if request.request_id in ready:
                request.num_computed_tokens += dice.randint(1, 6)
            if request.num_computed_tokens >= whole or dice.random() < 0.01:
                running.remove(request)
                scheduler.consumer.release(request.request_id)
            elif dice.random() < 0.05:
                request.num_computed_tokens, request.num_preemptions = (
                    0,
                    request.num_preemptions + 1,
                )
                running.remove(request)
                waiting.insert(0, request)
        if not ready:
            time.sleep(0.001)

    assert scheduler.pinned_entries() == 0
    assert scheduler.consumer.take_unavailable() == set()
    assert scheduler.counts.take_counts() == {}


def lines_of(call: Callable[[], object]) -> int:
    """Return the number of Python lines that a call runs; other processes do not affect it."""
    lines = 0

    def trace(_frame: Any, event: str, _arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return lines


def settled_at_once(schedule: Any, number: int) -> tuple[Scheduler, list[Any]]:
    """Return requests of two pictures each, with entries that arrived after the first step."""
    store = FakeStore()
    store.go.clear()
    scheduler: Scheduler = schedule(store, 10 * number, timeout_s=WITHIN_S)
    requests = [scheduler.request(f"r{n}", f"a{n}", f"b{n}") for n in range(number)]
    scheduler.step(*requests)
    store.go.set()
    scheduler.until(lambda: len(scheduler.fetcher._results) == 2 * number)  # noqa: SLF001
    return scheduler, requests


def lines_of_a_step(schedule: Any, number: int, what: str) -> int:
    scheduler, requests = settled_at_once(schedule, number)
    if what == "abort":
        names = [one.request_id for one in requests]
        return lines_of(lambda: [scheduler.consumer.release(name) for name in names])
    if what == "settle":
        return lines_of(lambda: scheduler.step(*requests))
    scheduler.step(*requests)
    if what == "decode":
        for request in requests:
            request.num_computed_tokens = 2 + 2 * TOKENS
        scheduler.step(*requests)
    lines = lines_of(lambda: scheduler.step(*requests))
    assert len(scheduler.step(*requests)) == number
    return lines


@pytest.mark.parametrize(
    ("what", "most"), [("settle", 260), ("abort", 90), ("decode", 16), ("again", 32)]
)
def test_a_step_costs_only_its_changes(schedule: Any, what: str, most: int) -> None:
    """Four times the requests cost four times the lines; unchanged requests cost nothing."""
    small, large = (lines_of_a_step(schedule, number, what) for number in (50, 200))

    assert large <= 4.2 * small
    assert large / 200 <= most


def test_requests_that_wait_for_room_cost_one_lookup_each(schedule: Any) -> None:

    def lines(number: int) -> int:
        scheduler = schedule(FakeStore(), 1.5)
        requests = [scheduler.request(f"r{n}", f"a{n}", f"b{n}") for n in range(number)]
        scheduler.until(lambda: scheduler.step(*requests))
        return lines_of(lambda: scheduler.step(*requests))

    small, large = lines(50), lines(200)
    assert large <= 4.2 * small
    assert large / 200 <= 32


def test_exception_while_an_entry_is_taken_over_fails_no_other_request(
    vllm: Any, connect: Connect, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request settles its own items; the pins of the failing one are released."""
    connector = connect(timeout_s=WITHIN_S)
    put(connector, url, "a", vllm.entry())
    go, get = threading.Event(), connector._store.get  # noqa: SLF001
    monkeypatch.setattr(connector._store, "get", lambda key: go.wait(WITHIN_S) and get(key))  # noqa: SLF001
    first, second = vllm.request(vllm.feature("a")), vllm.request(vllm.feature("a"))
    second.request_id = "second"
    for request in (first, second):
        assert not connector.ensure_cache_available(request, 0)
    go.set()
    answers = connector._fetcher._results  # noqa: SLF001
    while not answers:
        time.sleep(0.001)
    acceptance = import_module("ec_store.engine.accept").Acceptance

    with monkeypatch.context() as patched:
        patched.setattr(acceptance, "accepts_entry", lambda *_: 1 / 0)
        assert settle(connector, first) == set()
    assert settle(connector, second) == set()

    assert counted(connector)["exceptions"] == 1
    connector.request_finished(second)
    connector.request_finished(first)
    gauges = connector._fetcher.gauges()  # noqa: SLF001
    assert gauges["pinned_bytes"] == gauges["inflight_bytes"] == 0
    assert connector.build_connector_meta(Step()).loads == {}
