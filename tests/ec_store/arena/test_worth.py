"""Eviction by worth: the order of entries, its ageing, and the trial of both orders."""

import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ec_store import EntryKey
from ec_store.__main__ import main
from ec_store.arena.extents import PAGE_BYTES, ExtentAllocator
from ec_store.arena.index import ArenaIndex, Client, Slot
from ec_store.arena.protocol import ArenaRequest, Done, End, read_request
from ec_store.arena.store import ArenaStore
from ec_store.arena.worth import (
    FARTHEST,
    HALF_LIFE,
    SAMPLED,
    STEPS,
    EncodeRate,
    OrderTrial,
    Ranked,
    WorthOrder,
)
from tests.ec_store.entries import entry
from tests.examples import scaled

SIZE = 100


def digest_of(name: object) -> bytes:
    return sha256(str(name).encode()).digest()


def drained(order: WorthOrder) -> list[bytes]:
    """Return the digests of all entries in the order of their eviction."""
    found = []
    while entry := order.pop():
        found.append(entry.digest)
    return found


class TestWorthOrder:
    def test_an_entry_of_more_seconds_for_each_byte_outlives_another(self) -> None:
        order = WorthOrder(SIZE)
        for number, rate in enumerate([0.0, 3.0, -3.0, 1.0]):
            order.enter(bytes([number]), 20, rate)

        assert drained(order) == [b"\2", b"\0", b"\3", b"\1"]

    def test_an_entry_that_is_used_more_outlives_another(self) -> None:
        order = WorthOrder(SIZE)
        entries = [order.enter(bytes([number]), 20, 0.0) for number in range(3)]
        for number, uses in enumerate([4, 0, 2]):
            for _ in range(uses):
                order.use(entries[number])

        assert drained(order) == [b"\1", b"\2", b"\0"]

    def test_the_newest_tenth_is_evicted_last_whatever_its_worth(self) -> None:
        order = WorthOrder(SIZE)
        order.enter(b"old", 10, FARTHEST)
        order.enter(b"newer", 5, -FARTHEST)
        order.enter(b"newest", 5, -FARTHEST)

        assert drained(order) == [b"old", b"newer", b"newest"]

    @pytest.mark.parametrize("uses", [2, 64])
    def test_an_old_favourite_goes_after_its_half_lives(self, uses: int) -> None:
        order = WorthOrder(SIZE)
        favourite = order.enter(b"favourite", 1, 0.0)
        for _ in range(uses - 1):
            order.use(favourite)
        victims: list[bytes] = []
        while b"favourite" not in victims:
            order.enter(digest_of(len(victims)), 1, 0.0)
            if len(victims) >= SIZE - 1 or order._entries > SIZE:  # noqa: SLF001
                victim = order.pop()
                assert victim is not None
                order.leave(victim, evicted=True)
                victims.append(victim.digest)
            else:
                victims.append(b"")
        turnovers = len(victims) / SIZE
        expected = HALF_LIFE * (uses - 1).bit_length()

        assert expected - 1 <= turnovers <= expected + 2

    def test_a_use_counts_half_after_a_half_life(self) -> None:
        order = WorthOrder(SIZE)
        entry = order.enter(b"entry", 1, 0.0)
        for _ in range(7):
            order.use(entry)
        order.enter(b"others", int(2 * HALF_LIFE * SIZE), 0.0)
        order.use(entry)

        assert entry.uses == 1 + 8 / 4

    def test_uses_of_an_evicted_entry_count_when_it_is_written_again(self) -> None:
        order = WorthOrder(SIZE)
        favourite = order.enter(b"favourite", 1, 0.0)
        for _ in range(7):
            order.use(favourite)
        others = [order.enter(digest_of(number), 1, 0.0) for number in range(3)]
        order.leave(favourite, evicted=True)
        again = order.enter(b"favourite", 1, 0.0)
        deleted = others.pop()
        order.use(deleted)
        order.leave(deleted, evicted=False)

        assert again.uses > 8
        assert order.enter(deleted.digest, 1, 0.0).uses == 1

    def test_steps_that_are_empty_are_dropped_without_an_eviction(self) -> None:
        order = WorthOrder(SIZE)
        for number in range(1000):
            order.leave(order.enter(digest_of(number), SIZE, 0.0), evicted=False)

        assert len(order._numbers) == len(order._steps) == 1  # noqa: SLF001

    @settings(max_examples=scaled(100))
    @given(st.data())
    def test_pop_returns_the_least_worth_of_all_entries_that_are_not_young(
        self, data: st.DataObject
    ) -> None:
        order = WorthOrder(SIZE)
        entries: list[Ranked] = []
        aside: list[Ranked] = []
        for step in range(60):
            call = data.draw(st.sampled_from(["enter", "use", "pop", "back", "leave"]))
            if call == "enter" or not entries:
                size, rate = data.draw(st.integers(1, 30)), data.draw(st.floats(-6, 6))
                entries.append(order.enter(digest_of(step % 20), size, rate))
            elif call == "use":
                order.use(data.draw(st.sampled_from(entries)))
            elif call == "leave":
                entry = entries.pop(data.draw(st.integers(0, len(entries) - 1)))
                order.leave(entry, evicted=data.draw(st.booleans()))
                aside = [each for each in aside if each is not entry]
            elif call == "back" and aside:
                order.put_back(aside.pop())
            elif call == "pop":
                ranked = [each for each in entries if each.step is not None]
                found = order.pop()
                if ranked:
                    assert found is not None
                    assert worth(found) < min(map(worth, ranked)) + 1 / STEPS
                else:
                    assert found is None or found not in aside
                if found is not None:
                    aside.append(found)
            check(order, entries, aside)


def worth(entry: Ranked) -> float:
    """Return the worth of an entry as one number, a power of two."""
    return entry.rate + math.log2(entry.uses) + entry.used_at


def check(order: WorthOrder, entries: list[Ranked], aside: list[Ranked]) -> None:
    """Check that each entry is in one place, that sums are exact, and that nothing grows."""
    young = list(order._young)  # noqa: SLF001
    ranked = [entry for step in order._steps.values() for entry in step]  # noqa: SLF001
    assert sorted(map(id, young + ranked + aside)) == sorted(map(id, entries))
    assert all(entry.step is None for entry in young + aside)
    assert all(entry in order._steps[entry.step] for entry in ranked if entry.step is not None)  # noqa: SLF001
    assert order._young_bytes == SIZE / 10 - sum(entry.size_bytes for entry in young)  # noqa: SLF001
    assert sorted(order._numbers) == sorted(order._steps)  # noqa: SLF001
    assert len(order._evicted) <= len(entries) == order._entries  # noqa: SLF001


class TestEncodeRate:
    def test_an_entry_is_compared_with_the_mean_of_all(self) -> None:
        rate = EncodeRate()

        assert rate.compare(100, 1.0) == 0
        assert rate.compare(100, 3.0) == pytest.approx(math.log2(3 / 2))
        assert rate.compare(50, 0.0) == 0

    @pytest.mark.fault(157)
    def test_a_measurement_far_from_the_mean_is_bounded(self) -> None:
        rate = EncodeRate()
        for _ in range(10_000):
            rate.compare(100, 0.1)

        assert rate.compare(100, 600.0) == FARTHEST
        assert rate.compare(10**6, 1e-9) == -FARTHEST


class TestOrderTrial:
    @staticmethod
    def run(trial: OrderTrial, draw: Callable[[int], object], requests: int) -> list[bool]:
        chosen = []
        for number in range(requests):
            trial.refer(digest_of(draw(number)), 10, 0.0)
            chosen.append(trial.by_worth)
        return chosen

    @pytest.mark.fault(159)
    def test_least_use_is_chosen_where_entries_are_used_for_a_time_only(self) -> None:
        rng = random.Random(1)  # noqa: S311
        trial = OrderTrial(400 * 10)
        pool = self.run(trial, lambda n: n if n % 2 else rng.randrange(500), 8_000)
        trace: list[int] = []

        def in_window(number: int) -> int:
            trace.append(rng.choice(trace[-1000:]) if number % 5 and trace else -number - 1)
            return trace[-1]

        window = self.run(trial, in_window, 40_000)

        assert sum(pool[-4_000:]) == 4_000
        assert sum(window[-4_000:]) == 0

    def test_entries_larger_than_its_memory_take_no_part(self) -> None:
        trial = OrderTrial(100 * SAMPLED)
        for number in range(100):
            trial.refer(digest_of(number), 101, 0.0)
            trial.refer(digest_of(number), 100, 0.0)

        assert trial.by_worth


@pytest.mark.parametrize("by_worth", [True, False])
def test_cost_of_a_hit_and_of_an_eviction_does_not_grow_with_the_entries(by_worth: bool) -> None:
    costs = [calls_of(entries, by_worth) for entries in (500, 10_000)]

    assert costs[1] <= costs[0] * 1.1


def calls_of(entries: int, by_worth: bool) -> int:
    """Return the calls that 200 hits and 200 writes into a full memory make."""
    index, client = ArenaIndex(ExtentAllocator(entries * PAGE_BYTES, 2**40)), Client()
    rng = random.Random(1)  # noqa: S311
    digests = [digest_of(number) for number in range(entries)]
    for digest in digests:
        write(index, client, digest)
        read(index, client, rng.choice(digests))
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    index.trial.by_worth = by_worth
    sys.setprofile(count)
    for number in range(200):
        read(index, client, digests[-number - 1])
        write(index, client, digest_of(-number - 1))
    sys.setprofile(None)
    return calls


def write(index: ArenaIndex, client: Client, digest: bytes, encode_s: float = 0.0) -> None:
    number = index.begin(client, Slot(digest, b"", PAGE_BYTES), 0)
    assert isinstance(number, int)
    assert index.commit(client, number, b"header", 0, encode_s)


def read(index: ArenaIndex, client: Client, digest: bytes) -> bool:
    [pin] = index.pin(client, [digest], 0)
    if pin is not None:
        index.unpin(client, [pin[0]], 0)
    return pin is not None


def test_an_arena_keeps_what_took_longer_to_encode() -> None:
    index, client = ArenaIndex(ExtentAllocator(10 * PAGE_BYTES, 2**40)), Client()
    for number in range(10):
        write(index, client, bytes([number]) * 32, 1.0 + number % 2)
    for number in range(10, 15):
        write(index, client, bytes([number]) * 32, 1.0)

    left = {slot.digest[0] for slot in index.slots()}
    assert {1, 3, 5, 7} <= left
    assert index.evictions == 5


@pytest.mark.fault(158)
def test_an_entry_without_a_measurement_counts_as_one_of_its_size() -> None:
    index, client = ArenaIndex(ExtentAllocator(4 * PAGE_BYTES, 2**40)), Client()
    for number, encode_s in enumerate([0.1, 0.0, 0.1, 0.0]):
        write(index, client, bytes([number]) * 32, encode_s)
    for number in range(4, 6):
        write(index, client, bytes([number]) * 32, 0.1)

    assert [slot.digest[0] for slot in index.slots()] == [2, 3, 4, 5]


def test_an_entry_in_use_is_passed_over_and_evicted_later() -> None:
    index, client = ArenaIndex(ExtentAllocator(3 * PAGE_BYTES, 2**40)), Client()
    for number in range(3):
        write(index, client, bytes([number]) * 32)
    index.lease([bytes(32)], 10, 0)
    [pin] = index.pin(client, [b"\1" * 32], 0)
    assert pin is not None
    write(index, client, b"\3" * 32)
    index.unpin(client, [pin[0]], 1)
    begun = index.begin(client, Slot(b"\4" * 32, b"", 3 * PAGE_BYTES), 11)

    assert isinstance(begun, int)
    assert len(index) == 0
    assert index.evictions == 4


def test_reads_after_the_first_save_the_encode() -> None:
    index, client = ArenaIndex(ExtentAllocator(3 * PAGE_BYTES, 2**40)), Client()
    write(index, client, b"a" * 32, 0.25)
    write(index, client, b"b" * 32)
    for _ in range(3):
        read(index, client, b"a" * 32)
        read(index, client, b"b" * 32)

    assert index.saved_s == 0.5


class EndBefore(ArenaRequest[Done], frozen=True, tag="End"):
    """`End` as releases had it that knew no encode seconds."""

    number: int
    header: bytes


def test_the_end_of_a_write_is_understood_with_and_without_encode_seconds() -> None:
    encoder = msgspec.msgpack.Encoder()
    before = msgspec.msgpack.Decoder(EndBefore)

    assert read_request(encoder.encode(EndBefore(7, b"header"))) == End(7, b"header", 0.0)
    assert before.decode(encoder.encode(End(7, b"header", 0.5))) == EndBefore(7, b"header")


def test_a_server_reports_the_seconds_that_reads_have_saved(
    path: Path, store: ArenaStore, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = replace(entry(), encode_s=0.25)
    store.put(EntryKey("ns", "measured"), measured)
    store.put(EntryKey("ns", "unknown"), entry())
    for _ in range(5):
        store.get(EntryKey("ns", "measured"))
        store.get(EntryKey("ns", "unknown"))
    memory = store.stats().memory
    with pytest.raises(SystemExit):
        main(["stat", f"shm://{path}"])
    out = capsys.readouterr().out

    assert memory is not None
    assert memory.saved_s == 1.0
    assert "saved      1.0 s of encoding\nevicts by  worth\n" in out


@pytest.mark.parametrize("mib", [1, 4])
def test_the_trial_holds_no_more_small_entries_than_the_index_may(mib: int) -> None:
    least_bytes = 4096
    trial = OrderTrial(mib * 2**20, least_bytes)
    for number in range(8000):
        trial.refer(sha256(b"%d" % number).digest(), 1, -20.0)

    most = mib * 2**20 // SAMPLED // least_bytes
    assert len(trial._least_use._sizes) == len(trial._worth._entries) == most  # noqa: SLF001
