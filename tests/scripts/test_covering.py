"""Pairwise test cases, for any factors and any exclusions."""

from itertools import chain, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.covering import Case, Pair, in_pairs, pairs_of


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, list[int]], set[Pair]]:
    """Return factors, and pairs of their values that exclude each other."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    factors = {f"f{number}": list(range(size)) for number, size in enumerate(sizes)}
    every = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    pairs = sorted(set(chain.from_iterable(map(pairs_of, every))), key=sorted)
    return factors, draw(st.sets(st.sampled_from(pairs), max_size=12))


@given(problems())
def test_pairwise_cases_cover_exactly_the_possible_pairs(
    problem: tuple[dict[str, list[int]], set[Pair]],
) -> None:
    factors, apart = problem

    def possible(case: Case) -> bool:
        return apart.isdisjoint(pairs_of(case))

    every: list[dict[str, Any]] = [
        dict(zip(factors, values, strict=True)) for values in product(*factors.values())
    ]
    cases = in_pairs(factors, possible)

    assert all(possible(case) and case in every for case in cases)
    assert set(chain.from_iterable(map(pairs_of, cases))) == set(
        chain.from_iterable(map(pairs_of, filter(possible, every)))
    )


def test_a_covering_has_few_combinations() -> None:
    factors = {f"f{number}": range(4) for number in range(10)}

    assert len(in_pairs(factors)) < 40  # of a million; the minimum is 16
