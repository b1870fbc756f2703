"""Decision whether lookups run on the event loop."""

from hypothesis import given
from hypothesis import strategies as st

from epd.encoder_cache.at_once import MOST_KEYS, SLOW_S, STALLED_S, THREADS_S, AtOnce

FAST_S = SLOW_S / 100


def trusted(now_s: float = 0.0) -> AtOnce:
    judge = AtOnce()
    judge.took_on_thread(FAST_S, now_s)
    return judge


def test_the_first_lookup_runs_on_a_thread() -> None:
    assert not AtOnce().allows_inline(1, 0.0)


def test_a_fast_lookup_on_a_thread_moves_the_next_to_the_loop() -> None:
    assert trusted().allows_inline(1, 0.0)


def test_a_slow_lookup_on_a_thread_keeps_the_next_on_a_thread() -> None:
    judge = AtOnce()
    judge.took_on_thread(2 * SLOW_S, 0.0)

    assert not judge.allows_inline(1, 0.0)


def test_a_lookup_of_many_keys_runs_on_a_thread() -> None:
    assert trusted().allows_inline(MOST_KEYS, 0.0)
    assert not trusted().allows_inline(MOST_KEYS + 1, 0.0)


def test_a_lookup_that_blocks_the_loop_moves_lookups_to_threads() -> None:
    judge = trusted()
    judge.took_on_loop(STALLED_S, 100.0)

    assert not judge.allows_inline(1, 100.0)
    judge.took_on_thread(FAST_S, 100.0)
    assert not judge.allows_inline(1, 100.0 + THREADS_S - 0.1)
    assert judge.allows_inline(1, 100.0 + THREADS_S)


def test_a_stall_of_the_process_during_a_lookup_keeps_lookups_on_the_loop() -> None:
    judge = trusted()
    judge.took_on_loop(STALLED_S - SLOW_S, 100.0)
    assert judge.allows_inline(1, 100.0)

    for _ in range(10):
        judge.took_on_loop(FAST_S, 100.0)
    judge.took_on_loop(STALLED_S - SLOW_S, 100.0)
    assert judge.allows_inline(1, 100.0)


def test_four_slow_lookups_in_a_row_move_lookups_to_threads() -> None:
    judge = trusted()
    for _ in range(3):
        judge.took_on_loop(2 * SLOW_S, 100.0)
    assert judge.allows_inline(1, 100.0)

    judge.took_on_loop(2 * SLOW_S, 100.0)
    assert not judge.allows_inline(1, 100.0)


def test_a_store_that_is_slow_again_on_threads_is_not_asked_on_the_loop() -> None:
    judge = trusted()
    judge.took_on_loop(STALLED_S, 100.0)
    judge.took_on_thread(FAST_S, 100.1)
    judge.took_on_thread(2 * SLOW_S, 100.2)

    assert not judge.allows_inline(1, 100.0 + THREADS_S)
    judge.took_on_thread(FAST_S, 100.0 + THREADS_S)
    assert judge.allows_inline(1, 100.0 + THREADS_S)


def test_a_slow_lookup_of_many_entries_keeps_the_others_on_the_loop() -> None:
    judge = trusted()
    judge.took_on_thread(2 * SLOW_S, 0.0)

    assert judge.allows_inline(1, 0.0)


def test_a_store_that_never_answers_on_a_thread_is_not_asked_on_the_loop_again() -> None:
    judge = trusted()
    judge.took_on_thread(None, 0.0)

    assert not judge.allows_inline(1, 10 * THREADS_S)
    judge.took_on_thread(FAST_S, 10 * THREADS_S)
    assert judge.allows_inline(1, 10 * THREADS_S)


def test_lookups_that_are_all_slightly_slow_move_to_threads() -> None:
    judge = trusted()
    for _ in range(20):
        judge.took_on_loop(1.5 * SLOW_S, 0.0)

    assert not judge.allows_inline(1, 0.0)


@given(st.lists(st.floats(0, SLOW_S)))
def test_fast_lookups_stay_on_the_loop(durations: list[float]) -> None:
    judge = trusted()
    for seconds in durations:
        judge.took_on_loop(seconds, 0.0)

    assert judge.allows_inline(1, 0.0)
