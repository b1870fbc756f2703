"""Memory of the fetcher: the budget always holds, and the sums match the entries."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ec_store.engine.entry_memory import (
    LARGE_BYTES,
    OVERHEAD_BYTES,
    PAGE_BYTES,
    EntryMemory,
    buffer_bytes,
    entry_bytes,
)
from ec_store.entry import Entry
from tests.examples import scaled

LIMIT = 10 * OVERHEAD_BYTES + 1000
NAMES = st.sampled_from("abcdefgh")


def sized(size_bytes: int) -> Entry:
    return Entry(memoryview(bytes(size_bytes)), "BF16", (size_bytes // 2,), "image")


@pytest.mark.parametrize(
    ("size_bytes", "reserved"),
    [
        (0, 0),
        (LARGE_BYTES - OVERHEAD_BYTES - 1, LARGE_BYTES - OVERHEAD_BYTES - 1),
        (LARGE_BYTES - 1, PAGE_BYTES),  # with its header it is large
        (LARGE_BYTES, PAGE_BYTES),
        (PAGE_BYTES, PAGE_BYTES),
        (PAGE_BYTES + 1, 2 * PAGE_BYTES),
    ],
)
def test_reservation_equals_the_size_of_the_buffer(size_bytes: int, reserved: int) -> None:
    assert buffer_bytes(size_bytes) == OVERHEAD_BYTES + reserved


def test_entry_counts_with_all_of_its_buffer() -> None:
    whole = memoryview(bytearray(5000))
    entry = Entry(whole[10:14].toreadonly(), "BF16", (2,), "image")
    assert entry_bytes(entry) == OVERHEAD_BYTES + 5000


def test_budget_is_reached_and_not_exceeded() -> None:
    memory = EntryMemory(LIMIT)
    memory.reserve("a", LIMIT - 100)
    memory.pin("a")
    assert memory.has_room({"b": 100})
    assert not memory.has_room({"b": 101})
    assert not memory.has_room({"b": 50, "c": 51})
    assert memory.has_room({"a": 10**9})


def test_a_request_larger_than_the_budget_is_admitted_by_itself() -> None:
    memory = EntryMemory(LIMIT)
    assert memory.has_room({"a": 10 * LIMIT})
    memory.reserve("a", 10 * LIMIT)
    memory.pin("a")
    assert not memory.has_room({"b": 1})
    memory.hold_entry("a", sized(LIMIT))
    assert not memory.has_room({"b": 1})
    memory.unpin("a")
    assert memory.has_room({"b": 10 * LIMIT})
    assert memory.held_bytes == 0


def test_fetch_that_nothing_pins_does_not_keep_the_next_one_out() -> None:
    """The fetch hangs, and its requests have continued without it."""
    memory = EntryMemory(LIMIT)
    memory.reserve("hangs", LIMIT)
    assert memory.has_room({"b": 1})
    memory.reserve("b", 1)
    memory.pin("b")
    assert not memory.has_room({"c": 1})


def test_kept_entry_needs_room_once_it_is_pinned() -> None:
    memory = EntryMemory(LIMIT)
    memory.reserve("kept", LIMIT // 2)
    memory.hold_entry("kept", sized(LIMIT // 2 - OVERHEAD_BYTES))
    memory.reserve("a", LIMIT // 2 + 1)
    memory.pin("a")

    assert memory.held_bytes == 0
    assert not memory.has_room({"kept": LIMIT // 2})


@dataclass
class Model:
    """Expected content of a memory.

    Attributes:
        pins: number of pins by identifier.
        reserved: bytes by identifier.
    """

    pins: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)


class Admission(RuleBasedStateMachine):
    """Random sequences of requests: they are admitted, receive their entries or not, and end."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = EntryMemory(LIMIT)
        self.model = Model()
        self.alone = False

    @rule(names=st.sets(NAMES, min_size=1), size=st.integers(1, LIMIT // 3))
    def ask(self, names: set[str], size: int) -> None:
        wanted = dict.fromkeys(names, OVERHEAD_BYTES + size)
        nothing_pinned = not self.model.pins
        if not self.memory.has_room(wanted):
            assert not nothing_pinned
            return
        self.alone |= nothing_pinned
        for name in sorted(names, key=lambda one: self.memory.entry(one) is None):
            if self.memory.entry(name) is None and name not in self.model.reserved:
                self.memory.reserve(name, wanted[name])
                self.model.reserved[name] = wanted[name]
            self.memory.pin(name)
            self.model.pins[name] = self.model.pins.get(name, 0) + 1

    @precondition(lambda self: self.model.reserved)
    @rule(data=st.data(), comes=st.booleans())
    def arrive(self, data: st.DataObject, comes: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.reserved)))
        size = self.model.reserved.pop(name) - OVERHEAD_BYTES
        if not comes:
            self.memory.unpin_all(name)
            self.model.pins.pop(name, None)
        self.memory.hold_entry(name, sized(size - size % 2) if comes else None)

    @precondition(lambda self: self.model.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.pins)))
        self.memory.unpin(name)
        self.model.pins[name] -= 1
        if not self.model.pins[name]:
            del self.model.pins[name]

    @rule(name=NAMES)
    def discard(self, name: str) -> None:
        self.memory.discard(name)

    @invariant()
    def sums_are_right(self) -> None:
        memory, pins = self.memory, self.model.pins
        held = {name: one for name in "abcdefgh" if (one := memory.entry(name)) is not None}
        assert memory.held_bytes == sum(map(entry_bytes, held.values()))
        pinned = sum(entry_bytes(one) for name, one in held.items() if name in pins)
        assert memory.pinned_bytes == pinned
        assert memory.reserved_bytes == sum(self.model.reserved.values())

    @invariant()
    def pinned_entries_are_there(self) -> None:
        for name in self.model.pins:
            there = self.memory.entry(name) is not None
            assert there != (name in self.model.reserved)

    @invariant()
    def budget_holds(self) -> None:
        """Check the budget; only an admission while nothing was pinned may exceed it."""
        taken = self.memory.held_bytes + self.memory.reserved_bytes
        assert taken <= LIMIT or self.alone
        if taken <= LIMIT:
            self.alone = False


TestAdmission = Admission.TestCase
TestAdmission.settings = settings(max_examples=scaled(150), stateful_step_count=30, deadline=None)
