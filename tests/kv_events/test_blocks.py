"""Marks of prompts, and the blocks of an engine that they are tied to."""

from collections import Counter
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from xxhash import xxh3_64_intdigest

from epd.kv_events.blocks import BlockMap
from epd.kv_events.markers import MARKER, marker_of, read_marker, sampled_prefix
from epd.routing.prefix import NO_PREFIX, Prefix

SIZE = 10

some_links = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 5_000)), min_size=1, max_size=1024
)


def prompt(*names: str, tokens: int = SIZE) -> Prefix:
    """Return a prompt with a link of this many tokens for each name."""
    digest = 0
    links = [digest := xxh3_64_intdigest(name.encode(), digest) for name in names]
    return Prefix(links, [tokens * (end + 1) for end in range(len(names))])


def blocks_of(one: Prefix) -> list[int]:
    """Return the hashes of a prompt's blocks: each depends on the links up to its end."""
    return [
        link ^ place
        for link, start, end in zip(one.links, (0, *one.ends), one.ends, strict=False)
        for place in range(start + SIZE, end + 1, SIZE)
    ]


@given(links=some_links)
def test_a_mark_names_the_links_of_its_prompt(links: list[tuple[int, int]]) -> None:
    ends, total = [], 0
    for _, tokens in links:
        total += tokens
        ends.append(total)
    whole = Prefix([link for link, _ in links], ends)
    one = sampled_prefix(whole)
    marker = marker_of(one)

    assert one.tokens == whole.tokens
    assert len(marker) < 2300
    assert marker.isascii()
    assert marker.isprintable()
    read = read_marker(marker)
    assert ([*read.links], [*read.ends]) == ([*one.links], [*one.ends])


@given(shared=st.integers(0, 1024), one=st.integers(0, 300), other=st.integers(0, 300))
def test_prompts_that_begin_alike_have_equal_links_in_their_marks(
    shared: int, one: int, other: int
) -> None:
    begins = [f"{number}" for number in range(shared)]
    first = prompt(*begins, *[f"a{number}" for number in range(min(one, 1024 - shared))])
    second = prompt(*begins, *[f"b{number}" for number in range(min(other, 1024 - shared))])
    both = {*first.links} & {*second.links}
    markers = [set(sampled_prefix(each).links) & both for each in (first, second)]

    # Only the last link of a prompt may be none of another's.
    assert len(markers[0] ^ markers[1]) <= 2
    assert markers[0] & markers[1] or shared == 0


@given(
    text=st.none()
    | st.text(max_size=200)
    | st.binary(max_size=40).map(lambda raw: f"{MARKER}{raw!r}")
)
def test_any_other_text_is_not_a_mark(text: str | None) -> None:
    read = read_marker(text)

    assert read is NO_PREFIX or list(read.ends) == sorted(read.ends)


def test_a_mark_has_a_bounded_number_of_links() -> None:
    assert read_marker(marker_of(prompt(*[f"{number}" for number in range(2000)]))) is NO_PREFIX
    assert read_marker(marker_of(prompt("a"))[:-3]) is NO_PREFIX
    assert read_marker(marker_of(Prefix([1, 2], [20, 10]))) is NO_PREFIX


def test_a_link_is_removed_with_the_block_of_its_end() -> None:
    one, engine = prompt("a", "b", "c"), BlockMap()
    a, b, c = blocks_of(one)
    engine.record_stored([a, b, c], None, SIZE, marker_of(one))
    assert engine.take_changes() == dict.fromkeys(one.links, SIZE)

    engine.record_removed([c])
    assert engine.take_changes() == {one.links[2]: None}
    engine.record_removed([7, b])
    assert engine.take_changes() == {one.links[1]: None}
    assert len(engine) == 1


def test_a_link_within_a_block_is_tied_to_the_block_before() -> None:
    one, engine = prompt("a", "b", "c", tokens=7), BlockMap()
    engine.record_stored([1, 2], None, SIZE, marker_of(one))
    assert engine.take_changes() == dict.fromkeys(one.links[1:], 7)

    engine.record_removed([2])
    assert engine.take_changes() == {one.links[2]: None}


def test_a_block_counts_until_its_last_copy_is_removed() -> None:
    one, engine = prompt("a"), BlockMap()
    for _ in range(3):
        engine.record_stored(blocks_of(one), None, SIZE, marker_of(one))
    engine.take_changes()
    engine.record_removed(blocks_of(one) * 2)
    assert engine.take_changes() == {}

    engine.record_removed(blocks_of(one))
    assert engine.take_changes() == {one.links[0]: None}


def test_links_before_the_stored_blocks_are_tied_to_the_block_before_them() -> None:
    """Another client's prompt has stored them, without a marker."""
    one, engine = prompt("a", "b", "c"), BlockMap()
    a, b, c = blocks_of(one)
    engine.record_stored([a, b], None, SIZE, None)
    assert engine.take_changes() == {}
    engine.record_stored([c], b, SIZE, marker_of(one))
    assert engine.take_changes() == dict.fromkeys(one.links, SIZE)

    engine.record_removed([b])
    assert engine.take_changes() == dict.fromkeys(one.links[:2])


def test_blocks_after_an_unknown_one_are_placed_by_the_prompts_end() -> None:
    """They were stored before this process listened."""
    one, engine = prompt("a", "b", "c"), BlockMap()
    _, b, c = blocks_of(one)
    engine.record_stored([c], b, SIZE, marker_of(one))
    assert engine.take_changes() == dict.fromkeys(one.links, SIZE)

    engine.record_removed([c])
    assert engine.take_changes() == {one.links[2]: None}
    engine.record_removed([b])
    assert engine.take_changes() == dict.fromkeys(one.links[:2])


def test_blocks_of_an_answer_tie_nothing() -> None:
    one, engine = prompt("a", "b"), BlockMap()
    engine.record_stored(blocks_of(one), None, SIZE, marker_of(one))
    engine.take_changes()
    engine.record_stored([7], blocks_of(one)[-1], SIZE, marker_of(one))

    assert engine.take_changes() == {}
    assert len(engine) == 3


def test_the_memory_of_an_engine_is_bounded() -> None:
    engine, held = BlockMap(max_blocks=50, max_links=20), dict[int, int | None]()
    for number in range(40):
        one = prompt(*[f"{number} {link}" for link in range(3)])
        engine.record_stored(blocks_of(one), None, SIZE, marker_of(one))
        held |= engine.take_changes()
        assert len(engine) <= 50

    assert sum(tokens is not None for tokens in held.values()) == 20
    assert engine.take_changes() == {}


some_names = st.lists(st.sampled_from("ab"), min_size=1, max_size=5)


class EngineMachine(RuleBasedStateMachine):
    """Whatever an engine stores and removes, no link outlives its blocks.

    The engine computes prompts from the first block on that it lacks, or at the same time as equal
    ones, so that it has copies. It removes the end of a prompt before its beginning. The places of
    links are a guess if it computes a prompt in chunks: a link may then outlive its own block, but
    not the first one of its prompt.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockMap()
        self.copies: Counter[int] = Counter()
        self.after: dict[int, set[int]] = {}
        self.known: dict[int, int | None] = {}
        self.block_of: dict[int, int] = {}
        self.first_of: dict[int, int] = {}
        self.guessed = False

    @rule(names=some_names, marked=st.booleans(), alone=st.booleans(), cut=st.integers(0, 4))
    def compute(self, names: list[str], marked: bool, alone: bool, cut: int) -> None:
        one = prompt(*names)
        every = blocks_of(one)
        first = next((at for at, one in enumerate(every) if not self.copies[one]), len(every))
        first = first if alone else min(first, cut)
        for before, block in zip([None, *every], every, strict=False):
            if before is not None:
                self.after.setdefault(before, set()).add(block)
        self.copies.update(every[first:])
        self.block_of |= dict(zip(one.links, every, strict=True))
        self.first_of |= dict.fromkeys(one.links, every[0])
        if first == len(every):
            return
        parent = every[first - 1] if first else None
        marker = marker_of(one) if marked else None
        self.blocks.record_stored(every[first:], parent, SIZE, marker)
        self._take()
        if marked and not self.guessed:
            assert all(self.known[link] == SIZE for link in one.links)

    @rule(names=st.lists(st.sampled_from("ab"), min_size=4, max_size=6), cut=st.integers(2, 4))
    def compute_in_chunks(self, names: list[str], cut: int) -> None:
        one = prompt("chunks", *names)
        every = blocks_of(one)
        if self.copies[every[0]]:
            return
        self.guessed = True
        self.copies.update(every)
        for before, block in pairwise(every):
            self.after.setdefault(before, set()).add(block)
        self.block_of |= dict(zip(one.links, every, strict=True))
        self.first_of |= dict.fromkeys(one.links, every[0])
        marker = marker_of(one)
        self.blocks.record_stored(every[:cut], None, SIZE, marker)
        self.blocks.record_stored(every[cut:], every[cut - 1], SIZE, marker)
        self._take()

    @precondition(lambda self: +self.copies)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        held = [one for one, count in self.copies.items() if count]
        last = [
            one
            for one in held
            if self.copies[one] > 1 or not any(self.copies[x] for x in self.after.get(one, ()))
        ]
        block = data.draw(st.sampled_from(last))
        self.copies[block] -= 1
        self.blocks.record_removed([block])
        self._take()

    @rule()
    def miss_events(self) -> None:
        self.blocks.clear_blocks()
        self.known.clear()

    @rule()
    def restart(self) -> None:
        self.copies.clear()
        self.miss_events()
        self.guessed = False

    def _take(self) -> None:
        self.known |= self.blocks.take_changes()

    @invariant()
    def links_have_their_blocks(self) -> None:
        for link, tokens in self.known.items():
            block = (self.first_of if self.guessed else self.block_of)[link]
            assert tokens is None or self.copies[block]


TestEngineMachine = EngineMachine.TestCase


@given(
    events=st.lists(
        st.one_of(
            st.tuples(
                st.lists(st.integers(0, 5), max_size=4),
                st.none() | st.integers(0, 6),
                st.integers(1, 50),
                st.none() | some_names.map(lambda names: marker_of(prompt(*names))),
            ),
            st.lists(st.integers(0, 6), max_size=3),
        ),
        max_size=30,
    )
)
def test_contradictory_events_end_with_nothing_once_all_is_removed(events: list[Any]) -> None:
    engine, known = BlockMap(), dict[int, int | None]()
    for event in events:
        if isinstance(event, tuple):
            engine.record_stored(*event)
        else:
            engine.record_removed(event)
        known |= engine.take_changes()
    for _ in range(1000):
        if len(engine):
            engine.record_removed(range(7))
    known |= engine.take_changes()

    assert len(engine) == 0
    assert not any(tokens is not None for tokens in known.values())
