"""Order in which pictures return, and the hits of an ideal cache."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.tools.bench.pictures import rng
from epd.tools.bench.replays import (
    NEW_IN_ARENA,
    POOL,
    REPLAYS,
    arena_trace,
    ideal_hit_rate,
    pool,
    seen_before,
    window_trace,
)

LONG = 20_000
TRACES = st.lists(st.integers(0, 20), min_size=1, max_size=200)


@pytest.mark.parametrize("name", REPLAYS)
@given(seed=st.integers(), length=st.integers(0, 300), more=st.integers(0, 50))
def test_a_longer_trace_of_a_seed_begins_like_a_shorter_one(
    name: str, seed: int, length: int, more: int
) -> None:
    replay = REPLAYS[name]
    assert replay(rng(seed, name), length) == replay(rng(seed, name), length + more)[:length]


@pytest.mark.parametrize("name", REPLAYS)
def test_replays_depend_on_the_seed(name: str) -> None:
    assert REPLAYS[name](rng(1, name), 100) != REPLAYS[name](rng(2, name), 100)


def test_pictures_of_the_arena_are_new_as_often_as_in_vision_arena() -> None:
    trace = arena_trace(rng("rate"), LONG)

    assert len(set(trace)) / LONG == pytest.approx(NEW_IN_ARENA, rel=0.05)
    assert ideal_hit_rate(trace) == pytest.approx(1 - NEW_IN_ARENA, rel=0.02)


def test_few_pictures_of_the_arena_are_asked_about_often_and_most_once_or_twice() -> None:
    counts = Counter(arena_trace(rng("popularity"), LONG)).most_common()
    top = sum(count for _, count in counts[: len(counts) // 100])

    assert top > LONG / 4
    assert sum(count <= 2 for _, count in counts) > len(counts) / 2


def test_four_of_five_requests_of_the_pool_are_about_its_pictures() -> None:
    trace = pool(rng("pool"), LONG)
    pooled = [number for number in trace if number < POOL]

    assert len(pooled) / LONG == pytest.approx(0.8, rel=0.02)
    assert len(set(pooled)) == POOL
    others = Counter(number for number in trace if number >= POOL)
    assert set(others.values()) == {1}


def test_four_of_five_pictures_of_the_window_were_among_the_last_50() -> None:
    trace = window_trace(rng("window"), LONG)
    repeats = [at for at in range(LONG) if trace[at] in trace[max(0, at - 50) : at]]

    assert len(repeats) == LONG * 4 // 5
    assert len(set(trace)) == LONG // 5


@given(TRACES)
def test_a_cache_that_keeps_everything_misses_each_picture_once(trace: list[int]) -> None:
    misses = round((1 - ideal_hit_rate(trace)) * len(trace))

    assert misses == len(set(trace))
    assert seen_before(trace).count(False) == misses
